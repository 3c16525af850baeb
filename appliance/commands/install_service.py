"""`appliance install-service`: prints or writes what starts the server with the machine."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from appliance.config import EngineConfig, ServerConfig, load_section
from appliance.errors import ConfigError

_UNIT = "appliance.service"
SYSTEM = Path("/etc/systemd/system")
CONFIG = Path("/etc/appliance/config.toml")


def install_service(
    model: Annotated[
        str, typer.Argument(help="Model to serve; without one, that of the settings.")
    ] = "",
    write: Annotated[
        bool, typer.Option("--write", help="Write the files instead of printing them.")
    ] = False,
    user: Annotated[
        bool, typer.Option("--user", help="For your own service manager; needs no root.")
    ] = False,
    run_as: Annotated[
        str | None,
        typer.Option(help="The account; without it one that exists only while the service runs."),
    ] = None,
    docker: Annotated[
        Path | None, typer.Option(help="A Dockerfile and compose files for this folder instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
) -> None:
    """Print the systemd unit that starts the server with the machine, or write it.

    The service says when it is ready and what it loads, lets answers end when it is stopped, and is
    restarted if it hangs. Settings come from /etc/appliance/config.toml, with --user from your own.
    """
    if docker is not None and (user or run_as):
        raise ConfigError("--docker goes with neither --user nor --run-as; leave one out")
    if user and run_as:
        raise ConfigError("--user and --run-as were given; leave one out")
    here = Path(model).expanduser()  # the service runs in another folder
    arguments = (str(here.absolute()) if model and here.exists() else model,) if model else ()
    if docker is not None:
        files, after = _for_docker(docker, arguments)
    elif user:
        files, after = _for_user(arguments)
    else:
        files, after = _for_system(arguments, run_as)
    if not write:
        for path, text in files.items():
            typer.echo(f"# {path}\n{text}")
        typer.echo(f"nothing was written; --write does it. Then:\n{after}", err=True)
        return
    for path, text in files.items():
        _write(path, text, replaces=force)
    typer.echo(f"next:\n{after}")


def _for_user(arguments: tuple[str, ...]) -> tuple[dict[Path, str], str]:
    from appliance.service.unit import ServicePlan, unit_text

    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    timeout = load_section(ServerConfig, {}).drain_timeout
    plan = ServicePlan(_own_words(), arguments, is_user=True, drain_timeout=timeout)
    path = Path(base) / "systemd" / "user" / _UNIT
    after = (
        "  systemctl --user daemon-reload\n"
        f"  systemctl --user enable --now {_UNIT}\n"
        "  loginctl enable-linger    # also while you are not logged in\n"
        f"  journalctl --user --unit {_UNIT} --follow"
    )
    return {path: unit_text(plan)}, after


def _for_system(arguments: tuple[str, ...], run_as: str | None) -> tuple[dict[Path, str], str]:
    from appliance.config.reference import example_config
    from appliance.service.unit import ServicePlan, unit_text

    if run_as is None:
        _require_outside_of_homes()
    timeout = load_section(ServerConfig, {}, CONFIG if CONFIG.is_file() else None).drain_timeout
    plan = ServicePlan(
        _own_words(), arguments, run_as=run_as, drain_timeout=timeout, config=str(CONFIG)
    )
    files = {SYSTEM / _UNIT: unit_text(plan)}
    if not CONFIG.exists():
        files[CONFIG] = example_config()
    after = (
        f"  edit {CONFIG}\n  systemctl daemon-reload\n  systemctl enable --now {_UNIT}\n"
        f"  systemctl status {_UNIT}\n  journalctl --unit {_UNIT} --follow"
    )
    return files, after


def _for_docker(folder: Path, arguments: tuple[str, ...]) -> tuple[dict[Path, str], str]:
    from appliance.service.container import container_files

    source = Path(__file__).absolute().parents[2]
    if not (source / "pyproject.toml").is_file():
        raise ConfigError(
            "an image is built from a checkout of the source, and this program was installed"
            " without one; run the command from a checkout"
        )
    timeout = load_section(ServerConfig, {}).drain_timeout
    model = arguments[0] if arguments else load_section(EngineConfig, {}).model
    files = container_files(source, folder, model, timeout + 15)
    after = (
        f"  cd {shlex.quote(str(folder))}\n"
        "  (umask 077; echo APPLIANCE_API_KEY=$(openssl rand -hex 16) > .env)\n"
        "  docker compose up --detach    # with a GPU: see compose.yaml"
    )
    return {folder / name: text for name, text in files.items()}, after


def _own_words() -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "appliance")


def _require_outside_of_homes() -> None:
    """Raise ConfigError, with a remedy, if the service's account cannot read the program."""
    for path in (Path(sys.executable).absolute(), Path(sys.executable).resolve()):
        if path.parts[1:2] in (("home",), ("root",)):
            raise ConfigError(
                f"{path} is in a home folder, which a service with an account of its own may not"
                " read; take --user, or --run-as NAME, or install it elsewhere: python3 -m venv"
                " /opt/appliance"
            )


def _write(path: Path, text: str, *, replaces: bool) -> None:
    try:
        if path.exists() and path.read_text() != text and not replaces:
            raise ConfigError(f"{path} exists and differs; compare it, or replace it with --force")
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o600 if path.suffix == ".toml" else 0o644
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            file.write(text)
    except OSError as error:
        hint = "; run it with sudo, or take --user" if error.errno in (1, 13, 30) else ""
        raise ConfigError(f"{path} cannot be written: {error.strerror}{hint}") from None
    typer.echo(f"wrote {path}")
