"""Matches module names against regular expressions from untrusted configs, in bounded time.

The matcher is Python's own, as in PEFT. A plain pattern has neither repeats nor groups, so the cost of matching it is
bounded. This process matches a moderate number of plain patterns. A separate process with limits on CPU time and memory
does all other matching.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slora_adapters.errors import Reason
from slora_adapters.peft import pattern_process
from slora_adapters.peft.pattern_process import CPU_SECONDS, find_first_matches
from slora_adapters.process.children import BASE_VARIABLES, pass_on

# Timeout of the separate process. The timeout is long, because two seconds of CPU time may take much longer on a busy
# machine.
_PATIENCE_S = 120.0
# Larger inputs are matched in a separate process. At these limits, matching takes about 0.3 s and compiling 0.1 s. An
# adapter that EVA initialized needs 314,000 matches for the 560 linears of a 70B Llama.
_MAX_OWN_MATCHES = 500_000
_MAX_OWN_CHARS = 100_000
_PLAIN = re.compile(r"(?:[\w.^-]|\\[.dw-])*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class PatternField:
    """A config field that contains patterns.

    name: PEFT's name of the field.
    patterns: the patterns as the file contains them.
    is_whole: whether a pattern has to match the whole name of a module. Otherwise it matches a suffix of the name.
    """

    name: str
    patterns: Sequence[str]
    is_whole: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether every pattern consists of literal characters and simple escapes. Such a pattern hardly backtracks."""
        return all(map(_PLAIN.match, self.patterns))

    @property
    def regexes(self) -> list[str]:
        """The regular expressions that Python matches, built by PEFT's rules."""
        return [pattern if self.is_whole else suffix_regex(pattern) for pattern in self.patterns]


def suffix_regex(pattern: str) -> str:
    """Returns PEFT's regular expression for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({pattern})$"


def match_fields(
    fields: Sequence[PatternField], names: Sequence[str]
) -> tuple[list[list[int | None]], list[Reason]]:
    """Returns the matches of each field, and the reasons to refuse the fields. The matches are complete only if there
    is no reason.

    The matches of a field have one entry per name: the index of the first pattern that matches, or None.

    Raises OSError if the matching process fails.
    """
    patterns = [pattern for field in fields for pattern in field.patterns]
    is_cheap = len(patterns) * len(names) <= _MAX_OWN_MATCHES and sum(map(len, patterns)) <= _MAX_OWN_CHARS
    if is_cheap and all(field.is_plain for field in fields):
        return [find_first_matches(one.regexes, names, is_whole=one.is_whole) for one in fields], []
    task = [(field.regexes, names, field.is_whole) for field in fields]
    lines, exit_code = _match_in_process(json.dumps(task))
    matches: list[list[int | None]] = []
    reasons = []
    for field, line in zip(fields, lines, strict=False):
        answer = json.loads(line)
        matches.append(answer.get("matches", []))
        if "error" in answer:
            reasons.append(Reason(field.name, f"{field.name}: {answer['error']}"))
    if len(lines) < len(fields):
        if exit_code != -signal.SIGXCPU:
            raise OSError(f"the process that matches patterns ended with exit code {exit_code}")
        late = fields[len(lines)].name
        message = f"{late}: matching takes more than {CPU_SECONDS} s of CPU time; simplify the repeats of the patterns"
        reasons.append(Reason(late, message))
    return matches, reasons


def _match_in_process(task: str) -> tuple[list[str], int]:
    """Returns the complete lines that the process printed, and its exit code. Raises OSError on a timeout."""
    command = [sys.executable, "-I", "-S", pattern_process.__file__, str(os.getpid())]
    environment = pass_on(os.environ, BASE_VARIABLES)
    try:
        done = subprocess.run(
            command,
            input=task,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            env=environment,
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"matching patterns did not end within {_PATIENCE_S:g} s") from None
    return done.stdout.split("\n")[:-1], done.returncode
