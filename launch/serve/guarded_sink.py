"""A feature sink whose errors end the training of the drafter, and not the engine."""

from collections.abc import Callable, Sequence

from aedit.spec_rollout.drafters import FeatureSink, RowStart, StepUpdate


class GuardedSink:
    """A `FeatureSink` that passes everything to another one until that raises, and nothing afterwards."""

    def __init__(self, sink: FeatureSink, failed: Callable[[Exception], None]) -> None:
        """Pass to `sink`; failed: takes its error."""
        self._sink, self._failed, self._is_over = sink, failed, False

    def begin(self, rows: Sequence[RowStart], version: int) -> None:
        """Add samples that start in these rows."""
        self._try(lambda: self._sink.begin(rows, version))

    def update(self, update: StepUpdate, version: int) -> None:
        """Receive the tokens and features of one step."""
        self._try(lambda: self._sink.update(update, version))

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""
        self._try(lambda: self._sink.move(source, target))

    def end(self, row: int, finished: bool) -> None:
        """Remove the sample of `row`."""
        self._try(lambda: self._sink.end(row, finished))

    def status(self) -> dict[str, object]:
        """Return contents and memory use."""
        return self._sink.status()

    def _try(self, call: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            call()
        except Exception as error:
            self._is_over = True
            self._failed(error)
