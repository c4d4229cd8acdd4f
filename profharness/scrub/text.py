"""What is private in a text: one table of rules that the scrubber replaces by and the audit searches by,
and the host and user names that a text gives away.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from profharness.environment import RELEVANT_VARIABLES

SECRET = "secret"
HIDDEN = "<secret>"
REMOVED = "<removed>"
MAX_PASSES = 4
OVERLAP = 1 << 10
MIN_NAME = 3
LONG_NAME = 5


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Variables that PyTorch's own messages advise; they say nothing of a machine.
HARMLESS_VARIABLES = frozenset(RELEVANT_VARIABLES) | words(
    "TORCH_LOGS TORCHDYNAMO_VERBOSE TORCH_SHOW_CPP_STACKTRACES TORCH_USE_CUDA_DSA"
)
PUBLIC_HOSTS = ("pytorch.org", "github.com", "nvidia.com", "python.org", "ui.perfetto.dev")
# Host and user names that half the world has, or that are words of traces.
COMMON_NAMES = words(
    "admin app aten attention autograd backward bench bool build cell char conda const container copy "
    "cuda cudnn cutlass data debian default dev device docker double ec2-user fedora fill flash float "
    "forward gemm gpu graph guest half home host index int jovyan kernel launch linuxbrew local "
    "localhost long lost+found main math max mean memcpy memset min model mul name native nccl nobody "
    "none notebook nvidia object ops process profharness public python python3 range reduce root run "
    "runner server shared softmax sort src step stream string sum temp tensor test thread time tmp "
    "torch train triton ubuntu user username users vector void vscode warmup work worker workspace"
)
# JSON keys whose value names a machine, a person or a job, whatever the value looks like.
PRIVATE_KEYS = words(
    "host_name hostname HOSTNAME traceName trace_id distributedInfo argv cmdline command_line env "
    "user username USER LOGNAME HOME PWD PATH LD_LIBRARY_PATH"
)

# Seen in a text before the patterns below are tried: they cost a hundred times more.
_GATES = (
    b"home", b"Users", b"users", b"host_name", b"hostname", b"HOST", b"user_name", b"username",
    b'"user"', b"USER", b"LOGNAME",
)  # fmt: skip
_WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
# A last part with a dot (`/home/run.py`) is a file's name.
_HOME = re.compile(
    r"[/\\](?:home\d*|[Uu]sers)[/\\]+(?:(?P<name>[A-Za-z_][\w.-]*)(?=[/\\])"
    r"|(?P<last>[A-Za-z_][\w-]*)(?![\w/\\-]|\.\w))"
)
_NAMED = re.compile(
    r"(?:\"(?:host_?name|HOSTNAME|user_?name|user|USER|LOGNAME)\"\s*:\s*\""
    r"|\b(?:HOST|HOSTNAME|USER|USERNAME|LOGNAME)=[\"']?)(?P<name>[A-Za-z_][\w.-]*)"
)


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Private names that texts give away: owners of home folders, values of `USER` and the like."""
    users, values = set[str](), set[str]()
    for text in texts:
        users.update(match["name"] or match["last"] for match in _HOME.finditer(text))
        values.update(match["name"] for match in _NAMED.finditer(text))
    return private_names(values) | set(filter(_worth_looking_for, users))


def windows(blocks: Iterable[bytes], overlap: int) -> Iterator[tuple[int, bytes]]:
    """Each block behind the last bytes of those before it, and where in all of them that begins."""
    offset, carried = 0, b""
    for block in blocks:
        window = carried + block
        yield offset - len(carried), window
        offset += len(block)
        carried = window[-overlap:]


def names_in_stream(blocks: Iterable[bytes]) -> frozenset[str]:
    """The same of a file in blocks of at least OVERLAP bytes."""

    def texts() -> Iterator[bytes]:
        """Texts that overlap and do not end inside a word."""
        window = b""
        for _, window in windows(blocks, OVERLAP):
            if any(gate in window for gate in _GATES):
                yield window.rstrip(_WORD)
        yield window[-OVERLAP:]

    return names_in(text.decode("utf-8", "replace").replace("\\/", "/") for text in texts())


def private_names(names: Iterable[str]) -> frozenset[str]:
    """The names with and without their domain, without common words."""
    variants = {part for name in names for part in (name.strip(), name.strip().partition(".")[0])}
    return frozenset(filter(_worth_looking_for, variants))


def _worth_looking_for(name: str) -> bool:
    common = name.lower() in COMMON_NAMES or name.isdecimal()
    return len(name) >= MIN_NAME and not common


def machine_names() -> frozenset[str]:
    """This machine's host name and this user's name, if they are no common words."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    return private_names(names)


@dataclass(frozen=True)
class Rule:
    """One kind of private thing. Every text that the pattern matches in holds the cheaper gate.
    replacement stands in a match's place, or gives what does (None: the match is harmless).
    """

    kind: str
    gate: re.Pattern[str]
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str | None]

    def replace(self, match: re.Match[str]) -> str | None:
        """What stands in the place of a match; None to let it be."""
        return self.replacement if isinstance(self.replacement, str) else self.replacement(match)

    def clean(self, text: str) -> str:
        """The text with every match replaced."""
        if not self.gate.search(text):
            return text

        def put(match: re.Match[str]) -> str:
            replacement = self.replace(match)
            return match[0] if replacement is None else replacement

        return self.pattern.sub(put, text)


_MIXED = r"(?=[\w-]*[0-9A-Z]|[a-z]{20})"  # a short word of small letters alone is a name
_FORMS = (
    r"gh[pousr]_[A-Za-z0-9]{10,}",
    r"github_pat_\w{10,}",
    r"glpat-[\w-]{10,}",
    rf"hf_{_MIXED}[A-Za-z0-9]{{10,}}",
    rf"sk-{_MIXED}[\w-]{{12,}}",
    rf"(?:sk|rk|pk)_(?:live|test)_{_MIXED}\w{{10,}}",
    r"(?:AKIA|ASIA)[0-9A-Z]{12,}",
    r"AIza[\w-]{30,}",
    r"xox[abeoprs]-[\w-]{10,}",
    rf"(?:pypi|npm|nvapi|dckr_pat|xapp)[-_]{_MIXED}[\w-]{{16,}}",
    r"eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?",
)
# What names a secret when `=` or `:` follows it; the word may end a longer one, as HF_TOKEN does.
_NAMES = (
    r"(?:(?i:token|secret|passw(?:or)?d|passphrase|pass_?phrase|credentials?|authorization"
    r"|(?:api|access|private|secret|auth|ssh|signing|encryption|license|account)[_-]?key)"
    r"|(?:(?<=_)|(?<![A-Za-z]))(?:KEY|PASS|PWD|AUTH))"
)
_MARKS = r"[\"'\\]*+"  # quotes of JSON, also inside a text of JSON
_VALUE = (
    r"(?P<value>(?i:(?:bearer|basic|digest|token)\s+(?=[^\s<]))?"
    r"(?:(?<=[\"'])[^\"'\\\n<]+|[^\s,;\"'&<>()\[\]{}\\]+))"
)
_ASSIGNED = re.compile(rf"(?P<name>{_NAMES}){_MARKS}\s*+(?:=(?!=)|:(?!:))\s*+\\*+[\"']?+{_VALUE}")
# what follows `token=` in texts of models and types
_HARMLESS = re.compile(
    r"(?:\d{1,7}(?:\.\d+)?|none|null|nil|nan|true|false|str|int|float|bytes|bool|optional|any|\*+)",
    re.IGNORECASE,
)
_STRONG = re.compile(r"passw|passphrase|secret|PASS|PWD", re.IGNORECASE)


# Every text that a rule matches in holds one of these in small letters; a search for words is ten
# times cheaper than the gates.
_HINTS = (
    "token", "secret", "pass", "credential", "auth", "key", "pwd", "bearer", "ghp_", "gho_", "ghu_",
    "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-", "k_live", "k_test", "akia", "asia", "aiza",
    "xox", "pypi", "npm", "nvapi", "dckr_pat", "xapp", "eyj",
)  # fmt: skip
_BYTE_HINTS = tuple(hint.encode() for hint in _HINTS)


def may_hold(text: str) -> bool:
    """Whether any rule of secrets can match in a text."""
    small = text.lower()
    return any(hint in small for hint in _HINTS)


def may_hold_bytes(data: bytes) -> bool:
    """The same of ASCII bytes."""
    small = data.lower()
    return any(hint in small for hint in _BYTE_HINTS)


def _hide_value(match: re.Match[str]) -> str | None:
    value = match["value"]
    number = value.replace(".", "", 1).isdecimal()
    if _HARMLESS.fullmatch(value) and not (number and _STRONG.search(match["name"])):
        return None
    whole, start = match[0], match.start("value") - match.start()
    return f"{whole[:start]}{HIDDEN}"


@lru_cache(maxsize=4096)
def names_a_secret(key: str) -> bool:
    """Whether a text that stands under this key is a secret."""
    return _ASSIGNED.search(f'"{key}": "x9"') is not None


def is_secret(key: str, value: object) -> bool:
    """Whether a member of a JSON object is a secret by its name; a count of tokens is none."""
    if not names_a_secret(key) or not isinstance(value, str | int | float):
        return False
    match = _ASSIGNED.search(f'"{key}": {msgspec.json.encode(value).decode()}')
    return match is not None and _hide_value(match) is not None


_PART = r"[\w.+@%~,$#{}-]"
# behind the slash of a path: what may stand before it
_START = r"(?:(?<![\w.)\]}>~*/\\-]/)|(?<=-[ILBD]/)|(?<=[\s\"'=(]//)|(?<=\\[nrt]/))"
_ROOTS = (
    "bin|boot|data|dev|etc|home|lib|lib64|media|mnt|nix|opt|private|proc|root|run|scratch|snap|srv"
    "|sys|tmp|Users|usr|var|workspace"
)


PUBLIC_ROOTS = re.compile(
    r"/(?:site-packages|dist-packages|lib/python3\.\d+|pytorch(?=/\w+/))(?=/)"
)


def _path(match: re.Match[str]) -> str:
    """What follows a root that many machines have (a package of Python's) is kept, without it."""
    quote = match[0][0] if match[0][0] in "\"'" else ""
    path = match[0].strip(quote) if quote else match[0]
    roots = list(PUBLIC_ROOTS.finditer(path))
    kept = path[roots[-1].end() :].lstrip("/") if roots else "<path>"
    return f"{quote}{kept}{quote}"


def _url(match: re.Match[str]) -> str | None:
    public = f".{match['host'].lower()}".endswith(tuple(f".{name}" for name in PUBLIC_HOSTS))
    return None if public and not match["login"] else "<url>"


def _variable(match: re.Match[str]) -> str | None:
    return None if match["name"] in HARMLESS_VARIABLES else "<variable>"


def _ipv4(match: re.Match[str]) -> str | None:
    octets = [int(part) for part in match[0].split(".")]
    return None if max(octets) > 255 or octets[0] in (0, 127) else "<address>"


def _ipv6(match: re.Match[str]) -> str | None:
    groups = [group for group in match[0].split(":") if group]
    if len(groups) < 3 and not match[0].lower().startswith(("fe80", "fc", "fd")):
        return None  # `c10::a` is C++
    try:
        ipaddress.IPv6Address(match[0])
    except ValueError:
        return None
    return "<address>"


_HEX = "[0-9a-fA-F]"
_TABLE: tuple[tuple[str, str, str, str | Callable[[re.Match[str]], str | None]], ...] = (
    (
        SECRET,
        r"(?i:token|secret|passwd|password|phrase|credentials?|authorization|key|pass|pwd|auth)"
        rf"{_MARKS}\s*+[:=]",
        _ASSIGNED.pattern,
        _hide_value,
    ),
    (
        SECRET,
        r"--[\w-]*(?i:token|passw|secret|key)",
        r"--(?P<name>[\w-]*(?i:token|password|passwd|secret|api-key))\s+(?P<value>[^\s\"'<-][^\s\"'<]*)",
        _hide_value,
    ),
    (
        SECRET,
        r"[Bb]earer|BEARER",
        r"(?P<name>[Bb]earer|BEARER)\s+(?P<value>[\w.~+/=-]{6,})",
        _hide_value,
    ),
    (
        SECRET,
        r"gh[pousr]_|github_pat_|glpat-|hf_|sk-|[srp]k_(?:live|test)_|AKIA|ASIA|AIza|xox[abeoprs]-"
        r"|pypi[-_]|npm[-_]|nvapi[-_]|dckr_pat[-_]|xapp[-_]|eyJ|PRIVATE KEY-",
        rf"(?<![A-Za-z0-9])(?:{'|'.join(_FORMS)})"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\-]*?-----END [A-Z ]*PRIVATE KEY-----"
        r"|[\w+/=\s\\]*)",
        HIDDEN,
    ),
    (
        "command line",
        r"\.(?:py|sh|ipynb)\b|-m |-c |torchrun|srun|mpirun",
        r"(?<![\w.-])(?:[\w./-]*/)?(?:(?:torchrun|srun|mpirun) +-[^\n\"]*"
        r"|(?:python[\d.]*|torchrun|srun|mpirun|bash|sh)"
        r"(?: +-[^\s\"]*)*? +(?:[^\s\"]+\.(?:py|sh|ipynb)\b|-m +[\w.]+|-c +\S)[^\n\"]*)",
        "<command>",
    ),
    (
        "address",
        "://",
        r"\b[a-z][a-z0-9+.]*://(?P<login>[^\s/@\"'<>]*@)?(?P<host>[\w.-]+)[^\s\"'<>)]*",
        _url,
    ),
    (
        "environment variable",
        r"=(?<=[A-Z0-9_]=)",
        r"(?<![A-Za-z0-9_])(?P<name>[A-Z_][A-Z0-9_]+)=(?!=)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;\"')]+)",
        _variable,
    ),
    ("mail address", "@", r"[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b", "<mail>"),
    (
        "path",
        r"/(?<=[\"']/)",
        r"\"/(?:[^\"'\n/:]+/)+[^\"'\n:]*\"|'/(?:[^\"'\n/:]+/)+[^\"'\n:]*'",
        _path,
    ),
    (
        "path",
        rf"/{_START}",
        rf"(?:\bfile:/+|/{_START})(?:(?={_PART}*/?{_PART}*[A-Za-z_])(?:{_PART}+/)+{_PART}*"
        rf"|(?:{_ROOTS})(?![\w.-]){_PART}*)",
        _path,
    ),
    ("path", "~", rf"(?<![\w~])~[\w-]*/{_PART}[\w./+-]*", "<path>"),
    ("path", r"\\", r"(?<![A-Za-z0-9])[A-Za-z]:\\[^\s\"'<>|:]+|\\\\[\w.-]+\\[\w.$\\-]+", "<path>"),
    (
        "uuid",
        rf"-{_HEX}{{4}}-{_HEX}{{4}}-",
        rf"(?:\b(?:GPU|MIG)-)?(?<!{_HEX}){_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
        "<uuid>",
    ),
    (
        "bus address",
        rf":{_HEX}{{2}}(?::{_HEX}{{2}})?\.[0-7]",
        rf"(?<![\w:]){_HEX}{{4,8}}(?::{_HEX}{{2}}){{1,2}}\.[0-7](?!\w)",
        "<bus>",
    ),
    (
        "MAC address",
        rf"([:-]){_HEX}{{2}}\1{_HEX}{{2}}\1",
        rf"(?<![\w:-]){_HEX}{{2}}([:-])(?:{_HEX}{{2}}\1){{4}}{_HEX}{{2}}(?![\w:-])",
        "<address>",
    ),
    (
        "IP address",
        rf":{_HEX}{{0,4}}:{_HEX}{{0,4}}(?!\w)",
        rf"(?<![\w:.])(?:{_HEX}{{1,4}})?(?::{_HEX}{{0,4}}){{2,7}}(?![\w:])",
        _ipv6,
    ),
    (
        "IP address",
        r"\.\d{1,3}\.\d{1,3}\.\d",
        r"(?<![\w.])(?<!==)(?<![vV]ersion )(?<![vV]ersion\": \")\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)",
        _ipv4,
    ),
)
RULES = tuple(
    Rule(kind, re.compile(gate), re.compile(pattern), replacement)
    for kind, gate, pattern, replacement in _TABLE
)
SECRETS = tuple(rule for rule in RULES if rule.kind == SECRET)


class Match(NamedTuple):
    """One private thing in a text; of a secret text is the placeholder."""

    kind: str
    text: str


@dataclass(frozen=True)
class Cleaner:
    """The rules, and the host and user names that are private besides."""

    names: frozenset[str] = frozenset()
    _other: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = RULES[len(SECRETS) :]
        if self.names:
            either = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
            # long names also as a part of `alice_run`; short ones are parts of words too often
            long = [re.escape(name) for name in self.names if len(name) >= LONG_NAME]
            parts = f"|(?<![A-Za-z0-9])(?:{'|'.join(long)})(?![A-Za-z0-9])" if long else ""
            pattern = re.compile(rf"(?<![\w-])(?:{either})(?![\w-]){parts}")
            rules += (Rule("host or user name", re.compile(either), pattern, "<name>"),)
        object.__setattr__(self, "_other", rules)

    @property
    def byte_gates(self) -> list[re.Pattern[bytes]]:
        """The gates for ASCII bytes; where none opens, only secrets are to be cleaned."""
        return [re.compile(rule.gate.pattern.encode()) for rule in self._other]

    def rules(self, text: str) -> tuple[Rule, ...]:
        """The rules that can match in a text."""
        return (*SECRETS, *self._other) if may_hold(text) else self._other

    def find(self, text: str) -> Iterator[Match]:
        """Everything private in the text, rule by rule; no part of it under one kind twice."""
        covered: dict[str, list[tuple[int, int]]] = {}
        for rule in self.rules(text):
            if not rule.gate.search(text):
                continue
            spans = covered.setdefault(rule.kind, [])
            for match in rule.pattern.finditer(text):
                start, end = match.span()
                replacement = rule.replace(match)
                if replacement is None or any(a <= start and end <= b for a, b in spans):
                    continue
                spans.append((start, end))
                yield Match(rule.kind, replacement if rule.kind == SECRET else match[0])

    def clean(self, text: str) -> str:
        """The text with a placeholder for each thing that `find` finds; what resists is removed."""
        return _clean(self, text)

    def clean_json(self, value: Any) -> Any:
        """A JSON value with all its texts cleaned, keys too, and without PRIVATE_KEYS."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, dict):
            return {
                self.clean(str(key)): HIDDEN if is_secret(str(key), item) else self.clean_json(item)
                for key, item in value.items()
                if key not in PRIVATE_KEYS
            }
        if isinstance(value, list | tuple):
            return [self.clean_json(item) for item in value]
        return value


@lru_cache(maxsize=1 << 14)
def _clean(cleaner: Cleaner, text: str) -> str:
    for _ in range(MAX_PASSES):
        before = text
        for rule in cleaner.rules(text):
            text = rule.clean(text)
        if text == before:
            return text
    return text if next(cleaner.find(text), None) is None else REMOVED
