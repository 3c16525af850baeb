"""The command line: `appliance COMMAND`, a file for each command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from appliance.errors import ApplianceError
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.engine.process.launch import LaunchedProcess

FOLDER = "appliance.commands"  # one file for each command, with a function or Typer of its name


class Commands(TyperGroup):
    """The commands, each imported only to run it: importing all takes half a second.

    Attributes:
        lines: help line by command, at most 57 characters.
    """

    lines: ClassVar[Mapping[str, str]] = {
        "serve": "Serve a model behind an OpenAI-compatible endpoint.",
        "fit": "Rank the ways to serve a model on this machine.",
        "models": "Fetch, list, check and remove models.",
        "chat": "Talk with a server's model, or with one that runs here.",
        "connect": "Print the set-up of a client of the server.",
        "top": "Watch a running server: blocks, requests, throughput.",
        "quantize": "Quantize a model's weights into a folder.",
        "repack": "Store a quantized model in another format.",
        "evaluate": "Measure a checkpoint and write its quality card.",
        "card": "Show the quality card of a checkpoint.",
        "tune": "Time tiles of the kernels on this GPU, and keep them.",
        "doctor": "Check machine, settings, model files and server.",
        "bench": "Measure speed and print a report to post.",
        "cluster": "Serve a model on several machines, through Ray Serve.",
        "install-service": "Print or write the systemd unit of the server.",
        "settings": "List every setting, its default and bounds.",
        "config": "Show the settings in effect.",
        "lora": "List and check LoRA adapters.",
        "keys": "List API keys, or make a new one.",
        "cache": "List or remove KV cache kept on the disk.",
        "monitoring": "Print a Grafana dashboard, alerts or scrape settings.",
        "docs": "Read the documentation; it needs no network.",
    }

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: MutableMapping[str, Any] = CommandsOnDemand(self.lines, dict(self.commands))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command's name and line, without importing it."""
        if cmd_name in self.lines:
            return TyperCommand(cmd_name, help=self.lines[cmd_name], rich_markup_mode=None)
        return self.commands.get(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an option that others have names the one here."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            asked = getattr(error, "option_name", None)
            command = getattr(getattr(error, "ctx", None), "command", None)
            if asked is not None and command is not None:
                own = {name for one in command.params for name in one.opts}
                found = [name for name in OTHER_NAMES.get(asked, ()) if name in own]
                if found and hasattr(error, "possibilities"):
                    error.possibilities = found
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command in the arguments, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else self.commands[str(command.name)], rest


# Names that other programs, or other commands here, have for the same.
_CONTEXT = ("--max-model-len", "--context")
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("--context", "--context-length", "--ctx-size", "--ctx", "-c", "--n-ctx", "--num-ctx"),
        _CONTEXT,
    ),
    "--max-model-len": _CONTEXT,
    **dict.fromkeys(("--parallel", "--max-seqs", "--num-parallel"), ("--max-num-seqs",)),
    **dict.fromkeys(("--tensor-parallel-size", "--tp", "--tp-size"), ("--ranks",)),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp"), ("--pipeline-parallel",)),
    **dict.fromkeys(("--data-parallel-size", "--dp"), ("--replicas",)),
    **dict.fromkeys(("--listen", "--bind", "--address", "--ip"), ("--host", "--url")),
    **dict.fromkeys(("--quantization", "--load-in-4bit", "--load-in-8bit"), ("--weight-bits",)),
    **dict.fromkeys(
        ("--cache-type-k", "--cache-type-v", "--kv-cache-type"),
        ("--kv-cache-dtype",),
    ),
    **dict.fromkeys(("--alias", "--name", "--model-name"), ("--served-model-name",)),
    **dict.fromkeys(
        ("--model-draft", "--speculative-model", "--draft"), ("--draft-model", "--speculate")
    ),
    **dict.fromkeys(("--speculative-config", "--spec-type"), ("--speculate",)),
    **dict.fromkeys(("--enable-lora", "--lora-modules", "--adapter"), ("--lora",)),
    **dict.fromkeys(
        ("--cpu-moe", "--n-cpu-moe", "--cpu-offload-gb", "--n-gpu-layers"),
        ("--experts-on-cpu",),
    ),
    "--swap-space": ("--kv-host-memory",),
    "--api-key": ("--api-key-file",),
    "--enable-prefix-caching": ("--prefix-caching",),
    "--port": ("--url", "--web-port"),
    "--card": ("--gpu",),
    **dict.fromkeys(("--output", "-o", "--output-dir", "--dir"), ("--out",)),
    **dict.fromkeys(("--wbits", "--w-bits", "-q"), ("--bits",)),
    **dict.fromkeys(("--q-group-size", "--groupsize"), ("--group-size",)),
    **dict.fromkeys(("--dataset", "--imatrix"), ("--calibration",)),
    **dict.fromkeys(("--num-samples", "--nsamples", "--samples"), ("--calibration-tokens",)),
}


class CommandsOnDemand(MutableMapping[str, Any]):
    """Commands by name; imports one of `lines` on access."""

    def __init__(self, lines: Mapping[str, str], loaded: dict[str, Any]) -> None:
        self._names = list(lines)
        self._loaded = loaded

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in self._names:
                raise KeyError(name)
            self._loaded[name] = load_command(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from (name for name in self._loaded if name not in self._names)

    def __len__(self) -> int:
        return len({*self._names, *self._loaded})

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]


def load_command(name: str) -> Any:
    """Import a command's file and build its command or group."""
    own = name.replace("-", "_")
    found = getattr(importlib.import_module(f"{FOLDER}.{own}"), own)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, help=_as_paragraphs(found.__doc__))(found)
        return typer.main.get_command(single)
    group = typer.main.get_group(found)
    group.name = name
    return group


def _as_paragraphs(docstring: str | None) -> str:
    paragraphs = (docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app = typer.Typer(
    name="appliance",
    cls=Commands,
    rich_markup_mode=None,  # importing rich takes longer than the rest of --help
    help="A quantization-first LLM serving appliance for the home.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(launched: LaunchedProcess | None = None) -> NoReturn:
    """Run the command line; a user's error prints one line and exits non-zero.

    Args:
        launched: an engine process already started for `serve`.
    """
    try:
        app(obj=launched)
    except ApplianceError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def before_any_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Warn of environment variables that look like settings but are none."""
    # Those two warn themselves.
    if context.invoked_subcommand not in ("serve", "doctor"):
        from appliance.config import warn_of_unknown_variables

        warn_of_unknown_variables()


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
