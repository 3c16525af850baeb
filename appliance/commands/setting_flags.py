"""Gives a command a flag for each setting of some sections."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from appliance.config.setting import Field, Group, Unit, fields_of, flag_of
from appliance.errors import ConfigError

if TYPE_CHECKING:
    import msgspec

Flags = Mapping[str, object]  # value by setting; None if the flag is absent

_METAVARS = {int: "NUMBER", float: "NUMBER", str: "TEXT"}


def with_setting_flags(
    *sections: type[msgspec.Struct],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose first parameter takes `Flags`.

    Does not check values: the code that reads them can name the flag in its messages.
    """
    order = list(Group)
    fields = [
        field
        for section in sections
        for field in fields_of(section).values()
        if field.setting.has_flag
    ]
    fields.sort(key=lambda field: order.index(field.setting.group))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        _, *rest = inspect.signature(command).parameters.values()
        own = [one.replace(annotation=hints[one.name]) for one in rest]
        flags = [parameter for field in fields for parameter in _parameters(field)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            written = {field.name: _taken(field, given) for field in fields}
            command(written, **{one.name: given[one.name] for one in own})

        signature = inspect.Signature([*own, *flags])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in (*own, *flags)}
        return run

    return decorate


def _parameters(field: Field) -> Iterable[inspect.Parameter]:
    """Yield the parameters of a setting; a switch also has a hidden opposite.

    Help with both would exceed 80 columns.
    """
    yield _parameter(_own(field), field, field.flag)
    if field.type is bool:
        yield _parameter(_opposite(field), field, flag_of(f"no_{field.name}"), hidden=True)


def _parameter(name: str, field: Field, flag: str, *, hidden: bool = False) -> inspect.Parameter:
    is_switch = field.type is bool
    unit = field.setting.unit
    metavar = {Unit.BYTES: "SIZE", Unit.SECONDS: "TIME"}.get(unit, _METAVARS.get(field.type))
    text = field.setting.help
    if is_switch and field.default:
        text = f"{text.removesuffix('.')}; {flag_of(f'no_{field.name}')} does not."
    option = typer.Option(
        flag,
        help=text,
        metavar=None if is_switch else metavar,
        show_default=field.default_text or False,
        rich_help_panel=field.setting.group.value,
        hidden=hidden,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(bool if is_switch else str) | None, option],
    )


def _own(field: Field) -> str:
    return f"set_{field.name}"  # a command's own parameter may have the setting's name


def _opposite(field: Field) -> str:
    return f"unset_{field.name}"


def _taken(field: Field, given: Mapping[str, object]) -> object:
    """Return a setting's value.

    Raises:
        ConfigError: a switch is both on and off.
    """
    value = given[_own(field)]
    if field.type is bool and given[_opposite(field)] is not None:
        if value is not None:
            no = flag_of(f"no_{field.name}")
            raise ConfigError(f"{field.flag} and {no} were given; leave one out")
        return False
    return value
