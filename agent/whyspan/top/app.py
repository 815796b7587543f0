"""The application: one screen with all, one with a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static
from whyspan_exporters.reader import Stored

from whyspan.errors import StoreError
from whyspan.top import lines
from whyspan.top.source import Source
from whyspan.views.glance import Glance

WINDOWS: Final = ((60, "1 min"), (600, "10 min"), (3600, "1 h"), (86_400, "1 day"))
PERIOD_S: Final = 2.0
_SERVICES: Final = 5
_CAUSES: Final = 5


class Rows(DataTable[Text]):
    """The list of requests."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open"),
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
    ]


class RequestScreen(ModalScreen[None]):
    """One request, as ``whyspan explain`` tells it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,backspace", "app.pop_screen", "Back"),
        Binding("down,j", "scroll(1)", "Scroll", key_display="↑↓"),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("ctrl+c", "app.quit", show=False),
    ]

    def __init__(self, report: str) -> None:
        """*report*: lines of plain text."""
        super().__init__()
        self._report = report

    def compose(self) -> ComposeResult:
        """Lay it out."""
        with VerticalScroll(id="report"):
            yield Static(id="text")
        yield Footer(show_command_palette=False)

    def on_resize(self) -> None:
        """Wrap the lines."""
        text = lines.wrapped(self._report, self.app.size.width - 1)  # beside the scroll bar
        self.query_one("#text", Static).update(Text(text))

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        self.query_one("#report", VerticalScroll).scroll_relative(y=by, animate=False)


class Top(App[None]):
    """Services, the tail by cause, the newest slow requests; read again every two seconds."""

    TITLE = "whyspan top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; }
    #services { height: auto; scrollbar-size: 0 0; }
    #title { height: 1; text-style: bold; background: $panel; color: $foreground; }
    #causes { height: auto; }
    #rows { height: 1fr; min-height: 5; scrollbar-size: 0 1; }
    DataTable { background: $background; }
    RequestScreen { background: $background; }
    #report { scrollbar-size: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "service", "Service"),
        Binding("w", "window", "Window"),
        Binding("p", "pause", "Pause"),
        Binding("r", "refresh_now", "Refresh", show=False),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False),
    ]

    def __init__(
        self,
        source: Source,
        report: Callable[[Stored], str],
        window_s: int = 600,
        period_s: float = PERIOD_S,
    ) -> None:
        """Show *source*; *report* makes a request's text. *period_s* 0 reads only when asked."""
        super().__init__()
        self._source, self._report, self._period_s = source, report, period_s
        self._window = next((i for i, (s, _) in enumerate(WINDOWS) if s >= window_s), len(WINDOWS) - 1)
        self._service = ""
        self._paused = False
        self._seen: Glance | None = None
        self._error = ""

    def compose(self) -> ComposeResult:
        """Lay it out."""
        yield Static(id="head")
        services: DataTable[Text] = DataTable(id="services", cursor_type="none", cell_padding=0)
        services.can_focus = False
        yield services
        yield Static(lines.TAIL, id="title")
        yield Static(id="causes")
        yield Rows(id="rows", cursor_type="row", cell_padding=0)
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        """Begin to read."""
        for name, columns in (("#services", lines.SERVICES), ("#rows", lines.ROWS)):
            table: DataTable[Text] = self.query_one(name, DataTable)
            for title, width in columns:
                table.add_column(lines.title(title, width), width=width, key=title)
        self.query_one("#rows").focus()
        await self.look()
        if self._period_s:
            self.set_interval(self._period_s, self.look_again)

    async def on_unmount(self) -> None:
        """Let go of the store."""
        self._source.close()

    async def look_again(self) -> None:
        """Look, unless it is paused or a request is open."""
        if not self._paused and len(self.screen_stack) == 1:
            await self.look()

    async def look(self) -> None:
        """Read the store and show what is there; an error is shown until the store can be read."""
        seconds, _ = WINDOWS[self._window]
        try:
            self._seen = await self._source.glance(seconds, self._service)
            self._error = ""
        except StoreError as exc:
            self._error = str(exc)
        self._show()

    def _show(self) -> None:
        base = self.screen_stack[0]
        seen, (_, window) = self._seen, WINDOWS[self._window]
        base.query_one("#head", Static).update(
            lines.head(seen, window, self._service, self._error, self._paused)
        )
        if seen is None:
            return
        services: DataTable[Text] = base.query_one("#services", DataTable)
        services.clear()
        for line in seen.services[:_SERVICES]:
            services.add_row(*lines.service(line))
        base.query_one("#causes", Static).update(lines.causes(seen.causes, _CAUSES))
        rows = base.query_one("#rows", Rows)
        last = lines.last_width(self.size.width)
        rows.ordered_columns[-1].width = last
        chosen, at = self._chosen(rows), rows.scroll_offset
        follows = rows.cursor_row == 0
        rows.clear()
        for listed in seen.rows:
            rows.add_row(*lines.row(listed, last), key=listed.id)
        if chosen and not follows and chosen in rows.rows:
            rows.move_cursor(row=rows.get_row_index(chosen), scroll=False)
            rows.scroll_to(y=at.y, animate=False)

    def on_resize(self) -> None:
        """Give the last column what is left."""
        self._show()

    def _chosen(self, rows: Rows) -> str:
        """Return the id of the request under the cursor."""
        if not rows.row_count:
            return ""
        key = rows.coordinate_to_cell_key(rows.cursor_coordinate).row_key
        return key.value or ""

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the request that was chosen."""
        try:
            stored = await self._source.request(event.row_key.value or "")
            self._error = "" if stored is not None else "the store does not have it any more"
        except StoreError as exc:
            stored, self._error = None, str(exc)
        if stored is None:
            self._show()
        else:
            await self.push_screen(RequestScreen(self._report(stored)))

    async def action_service(self) -> None:
        """Show the next service alone, behind the last all of them."""
        names = ["", *(line.service for line in self._seen.services)] if self._seen is not None else [""]
        at = names.index(self._service) if self._service in names else 0
        self._service = names[(at + 1) % len(names)]
        await self.look()

    async def action_window(self) -> None:
        """Take the next longer window, behind the longest the shortest."""
        self._window = (self._window + 1) % len(WINDOWS)
        await self.look()

    def action_pause(self) -> None:
        """Stop or go on."""
        self._paused = not self._paused
        self._show()

    async def action_refresh_now(self) -> None:
        """Look now."""
        await self.look()
