"""Asks for confirmation before an action that cannot be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from appliance.tui import palette

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType


class ConfirmScreen(ModalScreen[bool]):
    """A question over the screen; only `y` confirms."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "Yes"),
        ("n,escape,q,enter,ctrl+c", "dismiss(False)", "No"),
    ]
    DEFAULT_CSS = f"""
    ConfirmScreen {{ align: center middle; background: {palette.BACKGROUND} 70%; }}
    ConfirmScreen > Vertical {{
        width: 66; max-width: 100%; height: auto; padding: 1 2;
        border: round {palette.WARNING}; background: {palette.BACKGROUND};
    }}
    """

    def __init__(self, question: str, consequence: str) -> None:
        super().__init__()
        self._question, self._consequence = question, consequence

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(
                Text.assemble(
                    (self._question, f"bold {palette.BRIGHT}"),
                    "\n",
                    (self._consequence, palette.TEXT),
                    "\n\n",
                    ("y", f"bold {palette.WARNING}"),
                    (" yes   ", palette.MUTED),
                    ("n", f"bold {palette.ACCENT}"),
                    (" no", palette.MUTED),
                )
            )
