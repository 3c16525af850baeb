"""The base of all screens: header, keys and painting; and what it lays over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static

from appliance.tui import palette
from appliance.tui.controls import ControlError
from appliance.tui.look import SequenceKey
from appliance.tui.screens.help import HelpScreen
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.header import Header
from appliance.tui.widgets.lines import Lines
from appliance.tui.widgets.status_line import StatusLine

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.driver import Driver

    from appliance.tui.messages import BlockChosen, SequenceChosen, SortChosen
    from appliance.tui.session import Session
    from appliance.tui.view import View


MIN_WIDTH, MIN_HEIGHT = 40, 10


class TooSmall(Lines):
    DEFAULT_CSS = "TooSmall { height: 1fr; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return ()

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        words = ["Terminal too small:", f"{width}x{height}.", "40x10 is the least.", "q quits."]
        return [Text(line[:width], palette.TEXT) for line in words]


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


class DashboardScreen(Screen[None]):
    """Base of the screens that the number keys show; subclasses define the body."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "app.quit", "Quit", key_display="q"),
        Binding("1", "app.switch_mode('overview')", "Screens", key_display="1-5"),
        Binding("2", "app.switch_mode('map')", "Map", show=False),
        Binding("3", "app.switch_mode('requests')", "Requests", show=False),
        Binding("4", "app.switch_mode('model')", "Model", show=False),
        Binding("5", "app.switch_mode('log')", "Log", show=False),
        Binding("c", "next_mode", "Colours"),
        Binding("tab", "focus_sequence(1)", "Next"),
        Binding("shift+tab", "focus_sequence(-1)", "Previous", show=False),
        Binding("escape", "show_all", "All"),
        Binding("p,space", "pause", "Pause", key_display="p"),
        Binding("left_square_bracket", "rewind(5)", "Back", key_display="["),
        Binding("right_square_bracket", "rewind(-5)", "Forward", show=False),
        Binding("left_curly_bracket", "rewind(60)", "A minute back", show=False),
        Binding("right_curly_bracket", "rewind(-60)", "A minute forward", show=False),
        Binding("x", "abort", "Abort", show=False),
        Binding("e", "app.next_replica", "Replica", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (typed by Textual)
        (0, "-tiny"), (MIN_WIDTH, "-narrow"), (110, "-wide"), (200, "-huge"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-flat"), (MIN_HEIGHT, "-low"), (21, "-short"), (34, "-middle"), (40, "-tall"),
        (46, "-full"), (60, "-high"),
    ]  # fmt: skip
    DEFAULT_CSS = f"""
    DashboardScreen {{
        background: {palette.BACKGROUND};
        #main {{ height: 1fr; }}
        Footer {{ background: {palette.BACKGROUND}; }}
        TooSmall {{ display: none; }}
        &.-tiny > *, &.-flat > * {{ display: none; }}
        &.-tiny > TooSmall, &.-flat > TooSmall {{ display: block; }}
    }}
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def compose(self) -> ComposeResult:
        yield TooSmall()
        yield Header()
        with Vertical(id="main"):
            yield from self.body()
        yield StatusLine()
        yield Footer(show_command_palette=False)

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        """Paint what changed while another screen was shown."""
        self.call_after_refresh(lambda: self.paint(self.session.view()))

    def framed(self, view: View) -> View:
        """Adapt the view to this screen, and the screen to the view."""
        return view

    def entitle(self, selector: str, title: str) -> None:
        """Set a panel's title if it differs, since each assignment repaints the panel."""
        for panel in self.query(selector):
            if panel.border_title != title:
                panel.border_title = title

    def paint(self, view: View, *, panels: bool = True, terminal: Driver | None = None) -> None:
        """Show another view.

        `terminal` is the driver if widgets may write past Textual.
        """
        if self.app.screen is not self or self.query("Toast"):
            terminal = None  # something lies over the screen
        view = self.framed(view)
        # A frame may come before the widgets exist or after they are gone; a query finds none then.
        for widget in self.query(Lines if panels else BlockMap):
            widget.present(view, terminal)

    def say(self, message: str) -> None:
        self.notify(message, severity="warning", markup=False)

    def action_next_mode(self) -> None:
        self.session.change(mode=self.session.look.mode.next)

    def action_pause(self) -> None:
        self.session.pause()

    def action_rewind(self, seconds: int) -> None:
        """Go back in time; negative seconds go forward."""
        self.session.rewind(seconds)

    def action_focus_sequence(self, step: int) -> None:
        self.session.focus_next(step)

    def action_show_all(self) -> None:
        self.session.change(focus=None)

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self.session.view().lettered))

    def action_abort(self) -> None:
        sequence = self.session.view().focused
        if refusal := self.session.why_not_abort(sequence):
            self.say(refusal)
            return
        assert sequence is not None
        key, of = SequenceKey.of(sequence), f" of {sequence.owner}" if sequence.owner else ""

        def decided(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._abort(key), name="abort")

        self.app.push_screen(
            ConfirmScreen(
                f"Abort {key.brief}{of}?",
                "Its client is told that whoever runs the server ended it.",
            ),
            decided,
        )

    async def _abort(self, key: SequenceKey) -> None:
        assert self.session.controls is not None
        try:
            await self.session.controls.abort(key.request_id)
        except ControlError as error:
            self.say(f"Not aborted: {error} ({key.brief})")
        else:
            self.notify(f"Aborted {key.brief}", markup=False)

    def on_sequence_chosen(self, message: SequenceChosen) -> None:
        """Focus the clicked sequence; a second click shows all."""
        again = message.key == self.session.look.focus
        self.session.change(focus=None if again else message.key)

    def on_block_chosen(self, message: BlockChosen) -> None:
        self.session.change(cursor=message.block)

    def on_sort_chosen(self, message: SortChosen) -> None:
        """Sort by the clicked column; a second click reverses the order."""
        look = self.session.look
        same = message.sort is look.sort
        self.session.change(sort=message.sort, ascending=same and not look.ascending)
