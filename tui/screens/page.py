"""What all pages share: the header, the keys, and one way to paint."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import Footer

from appliance.tui import palette
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.header import Header
from appliance.tui.widgets.status_line import StatusLine
from appliance.tui.widgets.too_small import TooSmall
from appliance.tui.wire import Painted, PaintsItself, painted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from textual.app import ComposeResult

    from appliance.tui.view import View

MIN_WIDTH, MIN_HEIGHT = 40, 10


class Page(Screen[None]):
    """One of the pages between which the number keys switch; a subclass says what is on it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "app.quit", "Quit", key_display="q"),
        Binding("1", "app.page('overview')", "Overview", show=False),
        Binding("2", "app.page('map')", "Map", show=False),
        Binding("3", "app.page('requests')", "Requests", show=False),
        Binding("4", "app.page('model')", "Model", show=False),
        Binding("5", "app.page('log')", "Log", show=False),
        Binding("c", "app.next_mode", "Colours"),
        Binding("tab", "app.focus_sequence(1)", "Next"),
        Binding("shift+tab", "app.focus_sequence(-1)", "Previous", show=False),
        Binding("escape", "app.show_all", "All"),
        Binding("p,space", "app.pause", "Pause", key_display="p"),
        Binding("left_square_bracket", "app.rewind(5)", "Back", key_display="["),
        Binding("right_square_bracket", "app.rewind(-5)", "Forward", show=False),
        Binding("left_curly_bracket", "app.rewind(60)", "A minute back", show=False),
        Binding("right_curly_bracket", "app.rewind(-60)", "A minute forward", show=False),
        Binding("x", "app.abort", "Abort", show=False),
        Binding("question_mark", "app.help", "Help", key_display="?"),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (typed by Textual)
        (0, "-tiny"), (MIN_WIDTH, "-narrow"), (110, "-wide"), (200, "-huge"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-flat"), (MIN_HEIGHT, "-low"), (21, "-short"), (34, "-middle"), (40, "-tall"),
        (46, "-full"), (60, "-high"),
    ]  # fmt: skip
    DEFAULT_CSS = f"""
    Page {{
        background: {palette.BACKGROUND};
        #page {{ height: 1fr; }}
        Footer {{ background: {palette.BACKGROUND}; }}
        TooSmall {{ display: none; }}
        &.-tiny > *, &.-flat > * {{ display: none; }}
        &.-tiny > TooSmall, &.-flat > TooSmall {{ display: block; }}
    }}
    """

    def compose(self) -> ComposeResult:
        """Header, what the page shows, keys."""
        yield TooSmall()
        yield Header()
        with Vertical(id="page"):
            yield from self.body()
        yield StatusLine()
        yield Footer(show_command_palette=False)

    def body(self) -> ComposeResult:
        """The widgets of this page."""
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        """Show at once what changed while another page was seen."""
        self.call_after_refresh(self.run_action, "app.repaint")

    def entitle(self, selector: str, title: str) -> None:
        """Put a title into the border of a panel; each change paints all of it anew."""
        for panel in self.query(selector):
            if panel.border_title != title:
                panel.border_title = title

    def paint(self, view: View, *, panels: bool = True) -> None:
        """Show another view.

        Args:
            view: what to show.
            panels: whether to show the numbers too, or only the map.
        """
        # A query, as a frame may fall due before the widgets are there and after they are gone.
        changed = [
            (widget, regions)
            for widget in self.query(PaintsItself if panels else BlockMap)
            if (regions := widget.present(view))
        ]
        if not changed:
            return
        app = self.app
        # What has changed is sent without Textual's way round by the whole screen, unless
        # something lies over the page or it is about to be laid out anew.
        if app.screen is not self or self._layout_required or app._batch_count:
            for widget, regions in changed:
                widget.refresh(*regions)
            return
        filters = app.get_line_filters()
        spans = [span for one in changed for span in painted(*one, filters)]
        app._display(self, cast("RenderableType", Painted(spans)))
