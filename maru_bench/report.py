"""What the prefix-sharing experiment found: plain data, the verdict, the table, the JSON file and the plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.table import Table

from maru_bench.servers import Answer

#: Sources of a prompt's tokens, in the order of the plot's stacks, with their colours.
_SOURCES: Final = (("computed", "#c44e52"), ("engine's own cache", "#8c8c8c"), ("loaded from the store", "#4c72b0"))


class Phase(msgspec.Struct, kw_only=True):
    """One pass over all prompts. ``answers`` has one element per prompt; ``error`` says why it is shorter."""

    key: str
    title: str
    server: str
    from_store: bool
    """Whether tokens must come from the store in this phase; if not, none may."""
    answers: list[Answer] = msgspec.field(default_factory=list)
    error: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def computed_tokens(self) -> int:
        return sum(answer.computed_tokens for answer in self.answers)

    @property
    def store_tokens(self) -> int:
        return sum(answer.storage_tokens for answer in self.answers)

    @property
    def ttft_s(self) -> float:
        """Median over the prompts, seconds; not a number without answers."""
        return statistics.median(answer.ttft_s for answer in self.answers) if self.answers else float("nan")

    def outputs_equal(self, cold: Phase) -> bool:
        """Whether every prompt got the very tokens of the cold run."""
        return [answer.output_ids for answer in self.answers] == [answer.output_ids for answer in cold.answers]

    def logprobs_equal(self, cold: Phase) -> bool:
        """Whether every token got the very log probability of the cold run, to the last bit."""
        return [answer.logprobs for answer in self.answers] == [answer.logprobs for answer in cold.answers]


class Report(msgspec.Struct, kw_only=True):
    """The whole experiment. The first phase is the cold run that the others are compared with."""

    backend: str
    device: str
    model: str
    prompt_tokens: list[int]
    new_tokens: int
    page_tokens: int
    phases: list[Phase] = msgspec.field(default_factory=list)
    ok: bool = False
    failures: list[str] = msgspec.field(default_factory=list)

    @property
    def cold(self) -> Phase:
        return self.phases[0]

    def judge(self) -> bool:
        """Fill in ``failures`` and ``ok``.

        Good means: every phase answered every prompt; outputs and log probabilities equal the cold run's in each;
        where tokens must come from the store, some did for every prompt, and elsewhere none did.
        """
        self.failures = []
        if not self.phases:
            self.failures.append("no phase was run")
        for phase in self.phases:
            if phase.error is not None:
                self.failures.append(f"{phase.title}: {phase.error}")
            if len(phase.answers) != len(self.prompt_tokens):
                self.failures.append(
                    f"{phase.title}: {len(phase.answers)} of {len(self.prompt_tokens)} prompts were answered"
                )
                continue
            for number, answer in enumerate(phase.answers):
                if len(answer.output_ids) != self.new_tokens or len(answer.logprobs) != self.new_tokens:
                    self.failures.append(
                        f"{phase.title}: prompt {number} got {len(answer.output_ids)} tokens and "
                        f"{len(answer.logprobs)} log probabilities, not {self.new_tokens}"
                    )
                if phase.from_store and answer.storage_tokens == 0:
                    self.failures.append(f"{phase.title}: prompt {number} got no token from the store")
                if not phase.from_store and answer.cached_tokens != 0:
                    self.failures.append(
                        f"{phase.title}: prompt {number} got {answer.cached_tokens} tokens from a cache; all had to be computed"
                    )
            if not phase.outputs_equal(self.cold):
                self.failures.append(f"{phase.title}: outputs differ from the cold run's")
            if not phase.logprobs_equal(self.cold):
                self.failures.append(f"{phase.title}: log probabilities differ from the cold run's")
        self.ok = not self.failures
        return self.ok

    def table(self) -> Table:
        """The experiment as a table for a terminal."""
        store = "Maru" if self.backend == "maru" else self.backend
        table = Table(
            title=f"Prefix sharing through {store} on {self.device}: "
            f"{len(self.prompt_tokens)} prompts, {sum(self.prompt_tokens)} tokens",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        # Headings on two lines and little else, so that the table fits a terminal of 80 columns.
        table.add_column("phase", no_wrap=True)
        table.add_column("server", justify="center")
        table.add_column("tokens\ncomputed", justify="right")
        table.add_column(f"tokens\nfrom {store}", justify="right")
        table.add_column("time to\nfirst token", justify="right", no_wrap=True)
        table.add_column("outputs\nequal", justify="center")
        table.add_column("logprobs\nequal", justify="center")
        for phase in self.phases:
            is_cold = phase is self.cold
            complete = len(phase.answers) == len(self.prompt_tokens)
            gain = "" if is_cold or not complete else f" ({self.cold.ttft_s / phase.ttft_s:.1f}x)"
            table.add_row(
                phase.title,
                phase.server,
                str(phase.computed_tokens),
                str(phase.store_tokens),
                f"{phase.ttft_s * 1e3:.0f} ms{gain}" if phase.answers else "no answer",
                "-" if is_cold else _yes(complete and phase.outputs_equal(self.cold)),
                "-" if is_cold else _yes(complete and phase.logprobs_equal(self.cold)),
            )
        return table

    def write_json(self, path: Path) -> None:
        """Everything, every answer included; each phase also with its sums, so that a reader need not add."""
        data = msgspec.to_builtins(self)
        for phase, entry in zip(self.phases, data["phases"], strict=True):
            entry["tokens_computed"] = phase.computed_tokens
            entry["tokens_from_store"] = phase.store_tokens
            entry["ttft_median_s"] = phase.ttft_s if phase.answers else None
            entry["outputs_equal"] = phase.outputs_equal(self.cold)
            entry["logprobs_equal"] = phase.logprobs_equal(self.cold)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")

    def write_plot(self, path: Path) -> None:
        """Where the prompts' tokens came from, and the time to the first token, phase by phase.

        Raises:
            ImportError: matplotlib is not installed.
        """
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        names = [phase.title for phase in self.phases]
        stacks = (
            [phase.computed_tokens for phase in self.phases],
            [phase.prompt_tokens - phase.computed_tokens - phase.store_tokens for phase in self.phases],
            [phase.store_tokens for phase in self.phases],
        )
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        bottom = [0] * len(names)
        for (label, colour), heights in zip(_SOURCES, stacks, strict=True):
            if any(heights):
                left.bar(names, heights, bottom=bottom, label=label, color=colour)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        left.set_ylabel("prompt tokens")
        left.set_title("where the tokens came from")
        figure.legend(loc="outside lower center", ncols=len(_SOURCES))
        times = [phase.ttft_s * 1e3 if phase.answers else 0.0 for phase in self.phases]
        bars = right.bar(names, times, color="#55a868")
        right.bar_label(bars, fmt="%.0f ms")
        right.set_ylabel("milliseconds, median over prompts")
        right.set_title("time to first token")
        right.margins(y=0.1)
        figure.suptitle(f"model {Path(self.model).name} on {self.device}, store: {self.backend}")
        for axes in (left, right):
            axes.tick_params(axis="x", labelsize=9)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _yes(equal: bool) -> str:
    return "[green]yes[/green]" if equal else "[bold red]NO[/bold red]"
