"""Training log: progress on stderr, JSON lines, and loggers such as TensorBoard.

A terminal gets a progress bar. Other outputs get a line at least every 10 seconds or every 5 % of the steps.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from vitrail.errors import TrainError
from vitrail.training.loggers.metric_logger import MetricLogger, select_loggers

LINE_SECONDS = 10.0  # longest time between two lines of progress, if steps are faster than this
LINE_FRACTION = 0.05  # largest fraction of the steps between two lines


class TrainLogger:
    """Log of one training run.

    On resume, rows after the start step are dropped, so the log has each step once.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        start_step: int,
        total_steps: int,
        quiet: bool = False,
        is_main_rank: bool = True,
        loggers: Sequence[str] | None = None,
    ):
        self.is_main_rank = is_main_rank  # only the main rank writes
        self.is_verbose = is_main_rank and not quiet
        self.loggers: dict[str, MetricLogger] = {}
        self.name, self.total_steps = name, total_steps
        self._step = start_step
        self._line_step = self._step
        self._first_step = self._step
        self._first_time = time.monotonic()
        self._line_time = self._first_time
        self.progress_bar = tqdm(
            total=total_steps,
            initial=start_step,
            desc=name,
            unit="step",
            disable=None if self.is_verbose else True,  # None: only on a terminal
            file=sys.stderr,
            dynamic_ncols=True,
        )
        if not is_main_rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "log.jsonl"
        rows = list(_read_rows_until(self.file, start_step))
        partial = self.file.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in rows))
        partial.replace(self.file)
        self.stream = self.file.open("a", buffering=1)
        for key, make in select_loggers(loggers).items():
            self._call_logger(key, lambda k=key, m=make: self.loggers.update({k: m(folder, name, start_step)}))

    def write_row(self, step: int, values: dict[str, float]) -> None:
        if self.is_main_rank:
            try:
                self.stream.write(json.dumps({"step": step, **values}) + "\n")
            except OSError as error:
                raise TrainError(
                    f"step {step} could not be written to {self.file}: {error}",
                    "free disk space and start the same command again; it resumes from the last checkpoint",
                ) from error
        self._call_all_loggers(lambda logger: logger.write_row(step, values))

    def flush(self) -> None:
        """Flush all loggers. The trainer calls it before each checkpoint."""
        self._call_all_loggers(lambda logger: logger.flush())

    def write_summary(self, rows: Mapping[str, str]) -> None:
        """Print what will be trained, before the first step."""
        width = max(map(len, rows))
        self.write_message(
            "\n".join([f"stage {self.name}", *(f"  {key:{width}}  {text}" for key, text in rows.items())])
        )

    def update_progress(self, values: Mapping[str, str]) -> None:
        """Report the end of a step: update the bar, or print a line if one is due."""
        self._step += 1
        if not self.progress_bar.disable:
            self.progress_bar.set_postfix(values, refresh=False)
            self.progress_bar.update()
            return
        if not self.is_verbose:
            return
        now, first = time.monotonic(), self._step == self._first_step + 1
        if first:  # the first step includes compilation and warmup, so the estimate starts after it
            self._first_time = now
        due = first or self._step == self.total_steps or now - self._line_time >= LINE_SECONDS
        if due or self._step - self._line_step >= LINE_FRACTION * self.total_steps:
            self._line_step, self._line_time = self._step, now
            texts = [f"{key} {text}" for key, text in values.items()]
            self.write_message(
                ", ".join([f"{self.name}: step {self._step:,}/{self.total_steps:,}", *texts, self._eta(now)])
            )

    def _eta(self, now: float) -> str:
        done = self._step - self._first_step - 1
        if not done:
            return "ETA unknown"
        seconds = (now - self._first_time) / done * (self.total_steps - self._step)
        return f"ETA {timedelta(seconds=round(seconds))}"

    def write_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Print the result of a validation."""
        texts = [f"{key.removeprefix('validation/')} {value:.4f}" for key, value in values.items()]
        self.write_message(", ".join([f"{self.name}: validation after step {step:,}", *texts]))

    def write_message(self, text: str) -> None:
        """Print text to stderr, above the progress bar."""
        if not self.progress_bar.disable:
            self.progress_bar.write(text, file=sys.stderr)
        elif self.is_verbose:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        self.progress_bar.close()
        if self.is_main_rank:
            self.stream.close()
        self._call_all_loggers(lambda logger: logger.close())

    def _call_all_loggers(self, act: Callable[[MetricLogger], None]) -> None:
        for name, logger in list(self.loggers.items()):
            self._call_logger(name, lambda one=logger: act(one))

    def _call_logger(self, name: str, act: Callable[[], None]) -> None:
        """Call a logger. If it fails, warn once and disable it; training continues."""
        try:
            act()
        except Exception as error:
            self.loggers.pop(name, None)
            warnings.warn(
                f"{name} is disabled, because it failed ({type(error).__name__}: {error}); training continues, "
                "and log.jsonl has all rows",
                stacklevel=2,
            )


def _read_rows_until(file: Path, step: int) -> Iterator[str]:
    """Yield the lines of a log up to a step. The resumed run writes later rows again."""
    if not step or not file.exists():  # a new run: ignore rows of an earlier run without a checkpoint
        return
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError):
            return  # the kill truncated the last line
