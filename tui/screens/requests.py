"""The requests screen: a sortable, filterable table, and details of the focused request."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from appliance.tui import palette
from appliance.tui.screens.dashboard_screen import MIN_WIDTH, DashboardScreen
from appliance.tui.widgets.request_detail import RequestDetail
from appliance.tui.widgets.requests import RequestTable

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from appliance.tui.view import View


class Filter(Input):
    """The input line of the table's filter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "leave", "Keep", key_display="enter"),
        Binding("escape", "clear", "Clear"),
    ]

    def action_leave(self) -> None:
        """Keep the filter and return the focus to the table."""
        self.set_class(bool(self.value), "-used")
        self.screen.set_focus(None)

    def action_clear(self) -> None:
        self.value = ""
        self.action_leave()


class RequestsScreen(DashboardScreen):
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "focus_sequence(1)", "Next", show=False),
        Binding("up", "focus_sequence(-1)", "Previous", show=False),
        Binding("s", "next_sort", "Sort"),
        Binding("r", "reverse_sort", "Reverse", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("x", "abort", "Abort"),
        # Not in the footer: narrow terminals have no room for all keys.
        Binding("c", "next_mode", "Colours", show=False),
        Binding("tab", "focus_sequence(1)", "Next", show=False),
        Binding("left_square_bracket", "rewind(5)", "Back", show=False),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (typed by Textual)
        (0, "-tiny"), (MIN_WIDTH, "-narrow"), (152, "-wide"),
    ]  # fmt: skip
    DEFAULT_CSS = f"""
    RequestsScreen {{
        RequestTable {{ height: 1fr; }}
        RequestDetail {{ width: 44; }}
        Filter {{
            padding: 0 1 !important; display: none; color: {palette.TEXT};
            background: {palette.BACKGROUND}; background-tint: transparent !important;
        }}
        Filter.-used {{ display: block; }}
        StatusLine {{ display: none; }}
        &.-narrow #body {{ layout: vertical; }}
        &.-narrow RequestDetail {{ width: 100%; height: 12; display: none; }}
        &.-narrow.-focused RequestDetail {{ display: block; }}
    }}
    """

    def body(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical():
                yield RequestTable()
                yield Filter(placeholder="filter: id, key, state, model", compact=True)
            yield RequestDetail()

    def framed(self, view: View) -> View:
        """On a narrow terminal, show details only of a focused sequence."""
        self.set_class(view.focused is not None, "-focused")
        return view

    def action_filter(self) -> None:
        field = self.query_one(Filter)
        field.add_class("-used")
        self.set_focus(field)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the table by the words typed."""
        self.session.change(query=event.value)

    def action_show_all(self) -> None:
        """Show all sequences; if all are shown, clear the filter."""
        if self.session.look.focus is not None:
            super().action_show_all()
        else:
            self.query_one(Filter).action_clear()

    def action_next_sort(self) -> None:
        self.session.change(sort=self.session.look.sort.next)

    def action_reverse_sort(self) -> None:
        self.session.change(ascending=not self.session.look.ascending)
