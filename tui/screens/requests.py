"""The page of the requests: a table to sort and filter, and all about the one in focus."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from appliance.tui import palette
from appliance.tui.messages import QueryTyped
from appliance.tui.screens.page import MIN_WIDTH, Page
from appliance.tui.widgets.request_detail import RequestDetail
from appliance.tui.widgets.requests import RequestTable

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.tui.view import View


class Filter(Input):
    """One line to type what the table must contain."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter", "leave", "Back to the table", show=False),
    ]

    def action_leave(self) -> None:
        """Keep the filter and give the keys back to the table."""
        self.screen.set_focus(None)


class RequestsPage(Page):
    """Every live sequence."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_sequence(1)", "Next", show=False),
        Binding("up", "app.focus_sequence(-1)", "Previous", show=False),
        Binding("s", "app.next_sort", "Sort"),
        Binding("r", "app.reverse_sort", "Reverse", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("x", "app.abort", "Abort"),
        # Not shown here: narrow terminals have no room for all.
        Binding("c", "app.next_mode", "Colours", show=False),
        Binding("left_square_bracket", "app.rewind(5)", "Back", show=False),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (typed by Textual)
        (0, "-tiny"), (MIN_WIDTH, "-narrow"), (152, "-wide"),
    ]  # fmt: skip
    DEFAULT_CSS = f"""
    RequestsPage {{
        RequestTable {{ height: 1fr; }}
        RequestDetail {{ width: 44; }}
        Filter {{
            height: 1; border: none; padding: 0 1; background: {palette.BACKGROUND};
            display: none;
        }}
        Filter.-used, Filter:focus {{ display: block; }}
        StatusLine {{ display: none; }}
        &.-narrow #body {{ layout: vertical; }}
        &.-narrow RequestDetail {{ width: 100%; height: 12; display: none; }}
        &.-narrow.-focused RequestDetail {{ display: block; }}
    }}
    """

    def body(self) -> ComposeResult:
        """The table, the detail beside it or below, and the filter."""
        with Horizontal(id="body"):
            with Vertical():
                yield RequestTable()
                yield Filter(placeholder="filter: id, key, state, model", id="filter")
            yield RequestDetail()

    def paint(self, view: View, *, panels: bool = True) -> None:
        """Show another view; a narrow terminal has the detail only while there is any."""
        self.set_class(view.focused is not None, "-focused")
        super().paint(view, panels=panels)

    def action_filter(self) -> None:
        """Let the person type."""
        field = self.query_one(Filter)
        field.add_class("-used")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show only what contains the words."""
        event.input.set_class(bool(event.value), "-used")
        self.post_message(QueryTyped(event.value))

    def clear_filter(self) -> None:
        """Show all again."""
        self.query_one(Filter).value = ""
