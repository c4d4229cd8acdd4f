"""What is private in a text: one registry of rules that the scrubber replaces by and the audit
searches by.
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
from typing import Any

import msgspec

from profharness.environment import RELEVANT_VARIABLES

OVERLAP = 1 << 10
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
_TOLD = re.compile(
    r"(?:\"(?:host_?name|HOSTNAME|user_?name|user|USER|LOGNAME)\"\s*:\s*\""
    r"|\b(?:HOST|HOSTNAME|USER|USERNAME|LOGNAME)=[\"']?)(?P<name>[A-Za-z_][\w.-]*)"
)


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """The names worth looking for that texts give away: owners of home folders, and values of keys
    and variables such as `host_name` and `USER`.
    """
    users: set[str] = set()
    told: set[str] = set()
    for text in texts:
        users.update(match["name"] or match["last"] for match in _HOME.finditer(text))
        told.update(match["name"] for match in _TOLD.finditer(text))
    return private_names(told) | {
        name for name in users if len(name) >= MIN_NAME and name.lower() not in COMMON_NAMES
    }


def names_in_stream(blocks: Iterable[bytes]) -> frozenset[str]:
    """The same of a file in blocks of at least OVERLAP bytes."""
    return names_in(_windows(blocks))


def _windows(blocks: Iterable[bytes]) -> Iterator[str]:
    """Texts that overlap and do not end inside a word."""
    carried = b""
    for block in blocks:
        window = carried + block
        if any(gate in window for gate in _GATES):
            yield _text(window.rstrip(_WORD))
        carried = window[-OVERLAP:]
    yield _text(carried)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\\/", "/")


SECRET = "secret"
HIDDEN = "<secret>"


_Replace = Callable[[re.Match[str]], str | None]


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
# what follows `token=` in texts of models and types
_HARMLESS = re.compile(
    r"(?:\d{1,7}(?:\.\d+)?|none|null|nil|nan|true|false|str|int|float|bytes|bool|optional|any|\*+)",
    re.IGNORECASE,
)
_STRONG = re.compile(r"passw|passphrase|secret|PASS|PWD", re.IGNORECASE)


def _hide(_: re.Match[str]) -> str:
    return HIDDEN


def _hide_value(match: re.Match[str]) -> str | None:
    value = match["value"]
    number = value.replace(".", "", 1).isdecimal()
    if _HARMLESS.fullmatch(value) and not (number and _STRONG.search(match["name"])):
        return None
    whole, start = match[0], match.start("value") - match.start()
    return f"{whole[:start]}{HIDDEN}"


TOKENS: tuple[str, str, _Replace] = (
    r"gh[pousr]_|github_pat_|glpat-|hf_|sk-|[srp]k_(?:live|test)_|AKIA|ASIA|AIza|xox[abeoprs]-"
    r"|pypi[-_]|npm[-_]|nvapi[-_]|dckr_pat[-_]|xapp[-_]|eyJ|PRIVATE KEY-",
    rf"(?<![A-Za-z0-9])(?:{'|'.join(_FORMS)})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\-]*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|[\w+/=\s\\]*)",
    _hide,
)
BEARER: tuple[str, str, _Replace] = (
    r"[Bb]earer|BEARER",
    r"(?P<name>[Bb]earer|BEARER)\s+(?P<value>[\w.~+/=-]{6,})",
    _hide_value,
)
OPTION: tuple[str, str, _Replace] = (
    r"--[\w-]*(?i:token|passw|secret|key)",
    r"--(?P<name>[\w-]*(?i:token|password|passwd|secret|api-key))\s+(?P<value>[^\s\"'<-][^\s\"'<]*)",
    _hide_value,
)
ASSIGNED: tuple[str, str, _Replace] = (
    r"(?i:token|secret|passwd|password|phrase|credentials?|authorization|key|pass|pwd|auth)"
    rf"{_MARKS}\s*+[:=]",
    rf"(?P<name>{_NAMES}){_MARKS}\s*+(?:=(?!=)|:(?!:))\s*+\\*+[\"']?+{_VALUE}",
    _hide_value,
)
_ASSIGNED = re.compile(ASSIGNED[1])


# One of these stands, in small letters, in every text that a rule matches in; a search for words is
# ten times cheaper than the gates.
_HINTS = (
    "token", "secret", "pass", "credential", "auth", "key", "pwd", "bearer", "ghp_", "gho_", "ghu_",
    "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-", "k_live", "k_test", "akia", "asia", "aiza",
    "xox", "pypi", "npm", "nvapi", "dckr_pat", "xapp", "eyj",
)  # fmt: skip
_BYTE_HINTS = tuple(hint.encode() for hint in _HINTS)


def may_hold(text: str) -> bool:
    """Whether any rule can match in a text."""
    small = text.lower()
    return any(hint in small for hint in _HINTS)


def may_hold_bytes(data: bytes) -> bool:
    """The same of ASCII bytes."""
    small = data.lower()
    return any(hint in small for hint in _BYTE_HINTS)


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


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Variables that PyTorch's own messages advise; they say nothing of a machine.
HARMLESS_VARIABLES = frozenset(
    (
        *RELEVANT_VARIABLES,
        "TORCH_LOGS",
        "TORCHDYNAMO_VERBOSE",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_USE_CUDA_DSA",
    )
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
MIN_NAME = 3
LONG_NAME = 5
# JSON keys whose value names a machine, a person or a job, whatever the value looks like.
PRIVATE_KEYS = words(
    "host_name hostname HOSTNAME traceName trace_id distributedInfo argv cmdline command_line env "
    "user username USER LOGNAME HOME PWD PATH LD_LIBRARY_PATH"
)
PUBLIC_ROOTS = re.compile(
    r"/(?:site-packages|dist-packages|lib/python3\.\d+|pytorch(?=/\w+/))(?=/)"
)
REMOVED = "<removed>"
MAX_PASSES = 4


_PART = r"[\w.+@%~,$#{}-]"
# behind the slash of a path: what may stand before it
_START = r"(?:(?<![\w.)\]}>~*/\\-]/)|(?<=-[ILBD]/)|(?<=[\s\"'=(]//)|(?<=\\[nrt]/))"
_ROOTS = (
    "bin|boot|data|dev|etc|home|lib|lib64|media|mnt|nix|opt|private|proc|root|run|scratch|snap|srv"
    "|sys|tmp|Users|usr|var|workspace"
)


@dataclass(frozen=True)
class Rule:
    """kind names what is found; replace gives what stands in its place, None to let it be; gate is
    found, at little cost, in every text that the pattern matches in.
    """

    kind: str
    gate: re.Pattern[str]
    pattern: re.Pattern[str]
    replace: Callable[[re.Match[str]], str | None]


def _constant(text: str) -> Callable[[re.Match[str]], str | None]:
    return lambda _: text


def _path(match: re.Match[str]) -> str:
    """What follows a root that many machines have (a package of Python's) is kept, without it."""
    path = match[0]
    quote = path[0] if path[0] in "\"'" else ""
    inner = path.strip(quote) if quote else path
    roots = list(PUBLIC_ROOTS.finditer(inner))
    kept = inner[roots[-1].end() :].lstrip("/") if roots else "<path>"
    return f"{quote}{kept}{quote}" if quote else kept


def _url(match: re.Match[str]) -> str | None:
    host = match["host"].lower()
    public = any(host == name or host.endswith(f".{name}") for name in PUBLIC_HOSTS)
    public = public and not match["login"]
    return None if public else "<url>"


def _variable(match: re.Match[str]) -> str | None:
    return None if match["name"] in HARMLESS_VARIABLES else "<variable>"


def _ipv4(match: re.Match[str]) -> str | None:
    octets = [int(part) for part in match[0].split(".")]
    harmless = max(octets) > 255 or octets[0] in (0, 127)
    return None if harmless else "<address>"


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


def _rule(
    kind: str, gate: str, pattern: str, replace: Callable[[re.Match[str]], str | None]
) -> Rule:
    return Rule(kind, re.compile(gate), re.compile(pattern), replace)


_SECRETS = tuple(_rule(SECRET, *parts) for parts in (ASSIGNED, OPTION, BEARER, TOKENS))
SECRET_RULES = len(_SECRETS)
RULES: tuple[Rule, ...] = (
    *_SECRETS,
    _rule(
        "command line",
        r"\.(?:py|sh|ipynb)\b|-m |-c |torchrun|srun|mpirun",
        r"(?<![\w.-])(?:[\w./-]*/)?(?:(?:torchrun|srun|mpirun) +-[^\n\"]*"
        r"|(?:python[\d.]*|torchrun|srun|mpirun|bash|sh)"
        r"(?: +-[^\s\"]*)*? +(?:[^\s\"]+\.(?:py|sh|ipynb)\b|-m +[\w.]+|-c +\S)[^\n\"]*)",
        _constant("<command>"),
    ),
    _rule(
        "address",
        "://",
        r"\b[a-z][a-z0-9+.]*://(?P<login>[^\s/@\"'<>]*@)?(?P<host>[\w.-]+)[^\s\"'<>)]*",
        _url,
    ),
    _rule(
        "environment variable",
        r"=(?<=[A-Z0-9_]=)",
        r"(?<![A-Za-z0-9_])(?P<name>[A-Z_][A-Z0-9_]+)=(?!=)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;\"')]+)",
        _variable,
    ),
    _rule(
        "mail address",
        "@",
        r"[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b",
        _constant("<mail>"),
    ),
    _rule(
        "path",
        r"/(?<=[\"']/)",
        r"\"/(?:[^\"'\n/:]+/)+[^\"'\n:]*\"|'/(?:[^\"'\n/:]+/)+[^\"'\n:]*'",
        _path,
    ),
    _rule(
        "path",
        rf"/{_START}",
        rf"(?:\bfile:/+|/{_START})(?:(?={_PART}*/?{_PART}*[A-Za-z_])(?:{_PART}+/)+{_PART}*"
        rf"|(?:{_ROOTS})(?![\w.-]){_PART}*)",
        _path,
    ),
    _rule("path", "~", rf"(?<![\w~])~[\w-]*/{_PART}[\w./+-]*", _constant("<path>")),
    _rule(
        "path",
        r"\\",
        r"(?<![A-Za-z0-9])[A-Za-z]:\\[^\s\"'<>|:]+|\\\\[\w.-]+\\[\w.$\\-]+",
        _constant("<path>"),
    ),
    _rule(
        "uuid",
        rf"-{_HEX}{{4}}-{_HEX}{{4}}-",
        rf"(?:\b(?:GPU|MIG)-)?(?<!{_HEX}){_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
        _constant("<uuid>"),
    ),
    _rule(
        "bus address",
        rf":{_HEX}{{2}}(?::{_HEX}{{2}})?\.[0-7]",
        rf"(?<![\w:]){_HEX}{{4,8}}(?::{_HEX}{{2}}){{1,2}}\.[0-7](?!\w)",
        _constant("<bus>"),
    ),
    _rule(
        "MAC address",
        rf"([:-]){_HEX}{{2}}\1{_HEX}{{2}}\1",
        rf"(?<![\w:-]){_HEX}{{2}}([:-])(?:{_HEX}{{2}}\1){{4}}{_HEX}{{2}}(?![\w:-])",
        _constant("<address>"),
    ),
    _rule(
        "IP address",
        rf":{_HEX}{{0,4}}:{_HEX}{{0,4}}(?!\w)",
        rf"(?<![\w:.])(?:{_HEX}{{1,4}})?(?::{_HEX}{{0,4}}){{2,7}}(?![\w:])",
        _ipv6,
    ),
    _rule(
        "IP address",
        r"\.\d{1,3}\.\d{1,3}\.\d",
        r"(?<![\w.])(?<!==)(?<![vV]ersion )(?<![vV]ersion\": \")\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)",
        _ipv4,
    ),
)


@dataclass(frozen=True)
class Match:
    """One private thing in a text: its kind, its place and its words (of a secret, what stands in
    its place in a copy).
    """

    kind: str
    start: int
    text: str


@dataclass(frozen=True)
class Cleaner:
    """The rules, and the host and user names that are private besides."""

    names: frozenset[str] = frozenset()
    _rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = RULES
        if self.names:
            either = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
            # long names also as a part of `alice_run`; short ones are parts of words too often
            long = [re.escape(name) for name in self.names if len(name) >= LONG_NAME]
            parts = f"|(?<![A-Za-z0-9])(?:{'|'.join(long)})(?![A-Za-z0-9])" if long else ""
            pattern = re.compile(rf"(?<![\w-])(?:{either})(?![\w-]){parts}")
            rules = (
                *RULES,
                Rule("host or user name", re.compile(either), pattern, _constant("<name>")),
            )
        object.__setattr__(self, "_rules", rules)

    @property
    def byte_gates(self) -> list[re.Pattern[bytes]]:
        """The gates for ASCII bytes: where none opens and `may_hold_bytes` denies secrets, nothing is
        to be cleaned.
        """
        rules = [rule for rule in self._rules if rule.kind != SECRET]  # see may_hold_bytes
        return [re.compile(rule.gate.pattern.encode()) for rule in rules]

    def find(self, text: str) -> Iterator[Match]:
        """Everything private in the text, rule by rule; no part of it under one kind twice."""
        covered: dict[str, list[tuple[int, int]]] = {}
        for rule in self._chosen(text):
            if not rule.gate.search(text):
                continue
            spans = covered.setdefault(rule.kind, [])
            for match in rule.pattern.finditer(text):
                start, end = match.span()
                if rule.replace(match) is None or any(a <= start and end <= b for a, b in spans):
                    continue
                spans.append((start, end))
                shown = rule.replace(match) if rule.kind == SECRET else match[0]
                yield Match(rule.kind, start, shown or "")

    def clean(self, text: str) -> str:
        """The text with a placeholder for everything that `find` finds; what resists is removed
        whole."""
        return _clean(self, text)

    def clean_json(self, value: Any) -> Any:
        """A JSON value with all its texts cleaned, keys too, and without PRIVATE_KEYS."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, dict):
            kept = ((key, each) for key, each in value.items() if key not in PRIVATE_KEYS)
            return {
                self.clean(str(key)): HIDDEN if is_secret(str(key), each) else self.clean_json(each)
                for key, each in kept
            }
        if isinstance(value, list | tuple):
            return [self.clean_json(each) for each in value]
        return value

    def _chosen(self, text: str) -> tuple[Rule, ...]:
        return self._rules if may_hold(text) else self._rules[SECRET_RULES:]

    def _once(self, text: str) -> str:
        for rule in self._chosen(text):
            if not rule.gate.search(text):
                continue
            text = rule.pattern.sub(lambda match, rule=rule: _put(rule, match), text)  # type: ignore[misc]
        return text


@lru_cache(maxsize=1 << 14)
def _clean(cleaner: Cleaner, text: str) -> str:
    for _ in range(MAX_PASSES):
        before, text = text, cleaner._once(text)
        if text == before:
            return text
    return text if next(cleaner.find(text), None) is None else REMOVED


def _put(rule: Rule, match: re.Match[str]) -> str:
    found = rule.replace(match)
    return match[0] if found is None else found


def private_names(found: Iterable[str]) -> frozenset[str]:
    """Host and user names that are worth looking for: with and without domain, no common words."""
    names: set[str] = set()
    for name in found:
        names |= {name.strip(), name.strip().partition(".")[0]}
    return frozenset(
        name
        for name in names
        if len(name) >= MIN_NAME and name.lower() not in COMMON_NAMES and not name.isdecimal()
    )


def machine_names() -> frozenset[str]:
    """This machine's host name and this user's name, as far as they are worth looking for."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError, KeyError, ImportError):
        found.append(getpass.getuser())
    return private_names(found)
