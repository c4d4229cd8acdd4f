"""What is private in a text by its form: one table of rules, which the scrubber replaces by and the
audit searches by.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from profharness.environment import CHANGED, RELEVANT_VARIABLES

SECRET = "secret"
HIDDEN = "<secret>"


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Variables that PyTorch's own messages advise; they say nothing of a machine.
HARMLESS_VARIABLES = frozenset(RELEVANT_VARIABLES) | words(
    "TORCH_LOGS TORCHDYNAMO_VERBOSE TORCH_SHOW_CPP_STACKTRACES TORCH_USE_CUDA_DSA"
)
PUBLIC_HOSTS = ("pytorch.org", "github.com", "nvidia.com", "python.org", "ui.perfetto.dev")
# Owners on github.com whose pages and repositories say nothing of who links to them.
PUBLIC_OWNERS = words(
    "dao-ailab facebookresearch huggingface numpy nvidia openai python pytorch triton-lang"
)


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
    r"(?:AKIA|ASIA|AGPA|AROA|AIDA)[0-9A-Z]{12,}",
    r"AIza[\w-]{30,}",
    r"xox[abeoprs]-[\w-]{10,}",
    rf"(?:pypi|npm|nvapi|dckr_pat|xapp|shpat|dop_v1|wandb_v1|gldt|glrt|xai|pplx)[-_]{_MIXED}[\w-]{{16,}}",
    rf"(?:gsk_|dapi|hvs\.|GOCSPX-|ya29\.|SG\.){_MIXED}[\w.-]{{20,}}",
    r"AGE-SECRET-KEY-1[0-9A-Z]{20,}",
    r"\d{8,10}:AA[\w-]{30,}",
    r"eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?",
)
# What names a secret when `=` or `:` follows it; the word may end a longer one, as HF_TOKEN does.
_NAMES = (
    r"(?:(?i:token|secret|passw(?:or)?d|passphrase|pass_?phrase|credentials?|authorization|cookie"
    r"|(?:api|access|private|secret|auth|ssh|signing|encryption|license|account)[_-]?key)"
    r"|(?:(?<=_)|(?<![A-Za-z]))(?:KEY|PASS|PWD|AUTH))"
)
_MARKS = r"[\"'\\]*+"  # quotes of JSON, also inside a text of JSON
_VALUE = (
    r"(?P<value>(?i:(?:bearer|basic|digest|token)\s+(?=[^\s<]))?"
    r"(?:(?<=[\"'])[^\"'\\\n<]+|[^\s,;\"'&<>()\[\]{}\\]+))"
)
_ASSIGNED = re.compile(rf"(?P<name>{_NAMES}){_MARKS}\s*+(?:=(?!=)|:(?!:))\s*+\\*+[\"']?+{_VALUE}")
# an option that takes a secret, and the value behind it or in the next text of a list
_OPTION = (
    r"--(?P<name>[\w-]*(?i:token|password|passwd|passphrase|secret|credentials|(?:api|access|private)-key)"
    r"|(?:[\w-]*-)?(?i:pass|pwd|auth))"
)
OPTION = re.compile(_OPTION)
# what follows `token=` in texts of models and types
_HARMLESS = re.compile(
    r"(?:\d{1,7}(?:\.\d+)?|none|null|nil|nan|true|false|str|int|float|bytes|bool|optional|any|\*+)",
    re.IGNORECASE,
)
_STRONG = re.compile(r"passw|passphrase|secret|PASS|PWD", re.IGNORECASE)


# Every text that a rule of secrets matches in holds one of these in small letters, or a _RUN; a
# search for words is ten times cheaper than the gates.
_HINTS = (
    "token", "secret", "pass", "credential", "auth", "key", "pwd", "bearer", "ghp_", "gho_", "ghu_",
    "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-", "k_live", "k_test", "akia", "asia", "aiza",
    "xox", "pypi", "npm", "nvapi", "dckr_pat", "xapp", "eyj", "agpa", "aroa", "aida", "shpat", "dop_v1",
    "wandb_v1", "gldt", "glrt", "xai-", "xai_", "pplx", "gsk_", "dapi", "hvs.", "gocspx", "ya29.", "sg.",
    ":aa", "ssh-", "aaaa", "-----begin", "basic", "cookie", "--user", " -u", "login",
)  # fmt: skip
_RUN = r"(?<![0-9A-Za-z+/])[0-9A-Za-z+/]{32}"
_BYTE_HINTS = tuple(hint.encode() for hint in _HINTS)
_LONG_WORD = r"(?<![\w+/.])(?:[0-9a-fA-F]{32,128}|[0-9A-Za-z+/]{40,}={0,2})(?![\w+/=])"
_LONG = re.compile(_LONG_WORD, re.ASCII)
_LONG_RUN = b"a" * 32
_RUNS = bytes(97 if re.match(rb"[0-9A-Za-z+/]", bytes([code])) else 32 for code in range(256))


def may_hold(text: str) -> bool:
    """Whether any rule of secrets can match in a text."""
    small = text.lower()
    return any(hint in small for hint in _HINTS) or _may_hold_key(text.encode("utf-8", "replace"))


def may_hold_bytes(data: bytes) -> bool:
    """The same of ASCII bytes."""
    small = data.lower()
    return any(hint in small for hint in _BYTE_HINTS) or _may_hold_key(data)


def _may_hold_key(data: bytes) -> bool:
    """Whether a long word looks like a key; a translation finds long words in no time."""
    runs = data.translate(_RUNS)
    at = runs.find(_LONG_RUN)
    while at >= 0:
        end = runs.find(b" ", at)
        end = len(runs) if end < 0 else end
        around = data[max(0, at - 48) : end + 3].decode("latin-1")
        if any(map(_hide_key, _LONG.finditer(around))):
            return True
        at = runs.find(_LONG_RUN, end)
    return False


def _hide_value(match: re.Match[str]) -> str | None:
    value = match["value"]
    number = value.replace(".", "", 1).isdecimal()
    if _HARMLESS.fullmatch(value) and not (number and _STRONG.search(match["name"])):
        return None
    whole, start = match[0], match.start("value") - match.start()
    return f"{whole[:start]}{HIDDEN}"


def _hide_basic(match: re.Match[str]) -> str | None:
    """Base64 of `user:password`; `Basic operations` is prose."""
    value = match["value"]
    try:
        plain = base64.b64decode(f"{value.rstrip('=')}{'=' * (-len(value.rstrip('=')) % 4)}")
    except binascii.Error:
        return None
    return f"{match['name']} {HIDDEN}" if b":" in plain and plain.isascii() else None


# What a hash of content is called where one stands: torch's commit, a file's or an image's digest.
_HASHES = r"(?:git|commit|rev|revision|sha\d*|hash|digest|md5|checksum|etag)"
HASH_NAME = re.compile(rf"(?:.*_)?{_HASHES}(?:_.*)?", re.IGNORECASE)
_HASH_BEFORE = re.compile(
    rf"(?:\b|_|\+){_HASHES}[\w-]*[\"'\\]*\s*[:=@+-]?\s*[\"'\\]*$", re.IGNORECASE
)
# An object whose members are such: `"backend_commit": {"naive": "…", "tiled": "…"}`.
_HASHES_BEFORE = re.compile(rf"(?:\b|_){_HASHES}[\"\\]*\s*:\s*\{{[^{{}}]*$", re.IGNORECASE)
HEX = re.compile(r"[0-9a-fA-F]{32,128}")


def _hide_key(match: re.Match[str]) -> str | None:
    """A long word that only a generator of keys makes: hexadecimal, or base64 of random bytes."""
    value = match[0].rstrip("=")
    if HEX.fullmatch(value):
        before = match.string[max(0, match.start() - 2000) : match.start()]
        named = _HASH_BEFORE.search(before[-40:]) or _HASHES_BEFORE.search(before)
        plain = value.isdecimal() or value.isalpha() or len(set(value.lower())) < 8
        return None if named or plain else HIDDEN
    return HIDDEN if len(value) >= 40 and _random(value) else None


def _random(value: str) -> bool:
    """Whether letters and digits change as often as by chance; in names of classes they do not."""
    kinds = ["0" if char.isdigit() else "A" if char.isupper() else "a" for char in value]
    changes = sum(first != second for first, second in itertools.pairwise(kinds))
    counts = [value.count(char) / len(value) for char in set(value)]
    entropy = -sum(share * math.log2(share) for share in counts)
    return len(set(kinds)) == 3 and changes >= 0.4 * len(value) and entropy >= 4.2


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


def is_argument(before: object, value: object) -> bool:
    """Whether a text of a list is the value of the option before it: `["--password", "x9"]`."""
    if not (isinstance(before, str) and isinstance(value, str)) or value[:1] in ("", "-", "<"):
        return False
    return OPTION.fullmatch(before) is not None and not _HARMLESS.fullmatch(value)


def is_hash(key: str, value: object) -> bool:
    """Whether a member of a JSON object is a hash of content by its name, such as `torch_git`."""
    named = isinstance(value, str) and HASH_NAME.fullmatch(key)
    return bool(named and HEX.fullmatch(str(value).removesuffix(CHANGED)))


_PART = r"(?:[\w.+@%~,$#{}-]|\\ )"
# A blank belongs to a path where a slash follows the word behind it, or a suffix that the part
# before it lacks: `/home/x/My Project/quiet notes.py`.
_PLAIN_PART = r"[\w.+@%~,$#{}-]"
_BLANKS = (
    rf"(?:(?: {_PLAIN_PART}+){{1,3}}/{_PART}*)*"
    r"(?:(?<!\.\w)(?<!\.\w\w)(?<!\.\w\w\w)(?<!\.\w{4})(?<!\.\w{5})(?: [\w+-]+){1,3}"
    r"\.[A-Za-z]\w{0,4}(?![\w.]))?"
)
# behind the slash of a path: what may stand before it
_START = r"(?:(?<![\w.)\]}>~*/\\-]/)|(?<=-[ILBD]/)|(?<=[\s\"'=(]//)|(?<=\\[nrt]/))"
_ROOTS = (
    "bin|boot|data|dev|etc|home|lib|lib64|media|mnt|nix|opt|private|proc|root|run|scratch|snap|srv"
    "|sys|tmp|Users|usr|var|workspace"
)


PUBLIC_ROOTS = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib/python3\.\d+|pytorch(?=/\w+/))(?=[/\\])"
)


def _path(match: re.Match[str]) -> str:
    """What follows a root that many machines have (a package of Python's) is kept, without it."""
    quote = match[0][0] if match[0][0] in "\"'" else ""
    path = match[0].strip(quote) if quote else match[0]
    roots = list(PUBLIC_ROOTS.finditer(path))
    kept = path[roots[-1].end() :].lstrip("/\\") if roots else "<path>"
    return f"{quote}{kept}{quote}"


def _encoded(match: re.Match[str]) -> str | None:
    return "<path>" if re.search("%(?:25)*(?:2[Ff]|5[Cc])", match[0]) else None


def _url(match: re.Match[str]) -> str | None:
    return None if not match["login"] and _public(match["host"], match["tail"]) else "<url>"


def _public(host: str, tail: str) -> bool:
    """Whether a page is known to all: of a public host, and on github.com of a public owner."""
    host = host.lower()
    if not f".{host}".endswith(tuple(f".{name}" for name in PUBLIC_HOSTS)):
        return False
    owner = re.match(r"(?::\d+)?/([\w.-]+)", tail)
    return not (owner and host.endswith("github.com")) or owner[1].lower() in PUBLIC_OWNERS


# What a full host name ends in. The second kind are also words of code, as in `torch.dev`.
_TOP = "com|org|net|edu|gov|mil"
_OTHER_TOP = (
    "ai|app|au|biz|br|ca|ch|cloud|cn|corp|cz|de|dev|dk|es|eu|fi|fr|hk|home|ie|il|info|internal|intern"
    "|intranet|io|jp|kr|lan|local|localdomain|mx|nl|nz|pl|private|ru|se|sg|tw|ua|uk|za"
)
_CODE = words(
    "aten at c10 cuda cudnn cutlass functorch model module numpy nvidia self torch triton"
)


def _host(match: re.Match[str]) -> str | None:
    host, tail = match["host"] or "", match["tail"]
    labels = host.split(".")
    if labels[-1].lower() in _TOP.split("|"):
        return None if _public(host, tail) else "<host>"
    if tail:
        return "<host>"
    marked = any(re.search(r"[A-Za-z].*\d|-", label) for label in labels[:-1])
    long = len(labels) > 2 and labels[0] not in _CODE and not any(map(str.isdecimal, labels))
    return "<host>" if marked or long else None


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
        ipaddress.IPv6Address(match[0].partition("%")[0])
    except ValueError:
        return None
    return "<address>"


_HEX = "[0-9a-fA-F]"
_TABLE: tuple[tuple[str, str, str, str | Callable[[re.Match[str]], str | None]], ...] = (
    (
        SECRET,
        r"(?i:token|secret|passwd|password|phrase|credentials?|authorization|cookie|key|pass|pwd|auth)"
        rf"{_MARKS}\s*+[:=]",
        _ASSIGNED.pattern,
        _hide_value,
    ),
    (
        SECRET,
        r"--[\w-]*(?i:token|pass|secret|key|credentials|pwd|auth)",
        rf"{_OPTION}(?:\s+[\\\"']*|[\\\"']+\s*,\s*[\\\"']+)(?P<value>[^\s\"'<\\-][^\s\"'<\\]*)",
        _hide_value,
    ),
    (
        SECRET,
        r"\s-u|--user",
        r"(?<!\S)(?P<name>-u|--user)(?:\s+|=)(?P<value>[^\s:\"'<]+:[^\s\"'<]+)",
        _hide_value,
    ),
    (
        SECRET,
        r"login\s",
        r"(?P<name>\blogin\s+\S+\s+password)\s+(?P<value>[^\s\"'<]+)",
        _hide_value,
    ),
    (
        SECRET,
        r"[Bb]asic\s|BASIC\s",
        r"\b(?P<name>[Bb]asic|BASIC)\s+(?P<value>[A-Za-z0-9+/]{6,}={0,2})(?![\w+/=])",
        _hide_basic,
    ),
    (
        SECRET,
        r"AAAA[A-Z]|ssh-",
        r"(?:(?:sk-)?(?:ssh|ecdsa)-[\w@.-]+\s+)?(?<![\w+/])AAAA[A-Z][\w+/]{11,}={0,2}"
        r"(?:\s+[\w.+-]+@[\w.-]+)?",
        HIDDEN,
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
        r"|pypi[-_]|npm[-_]|nvapi[-_]|dckr_pat[-_]|xapp[-_]|eyJ|-----BEGIN|AGPA|AROA|AIDA|shpat[-_]"
        r"|dop_v1|wandb_v1|gl[dr]t[-_]|xai[-_]|pplx[-_]|gsk_|dapi|hvs\.|GOCSPX-|ya29\.|SG\.|AGE-|:AA",
        rf"(?<![A-Za-z0-9])(?:{'|'.join(_FORMS)})"
        r"|-----BEGIN [A-Z0-9 ]{3,40}-----(?:[^<>]{0,9000}?-----END [A-Z0-9 ]{3,40}-----"
        r"|[\w+/=\s\\]*)",
        HIDDEN,
    ),
    (
        SECRET,
        _RUN,
        _LONG_WORD,
        _hide_key,
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
        r"\b[A-Za-z][A-Za-z0-9+.-]*://(?P<login>[^\s/@\"'<>]*@)?(?P<host>[\w.-]+|\[[\da-fA-F:.%\w]+\])"
        r"(?P<tail>[^\s\"'<>)]*)",
        _url,
    ),
    (
        "address",
        r"@[\w.-]+:",
        r"(?<![\w.+-])[\w.+-]+@(?!sha\d+:)[\w.-]+:(?=[\w./~+-]*[A-Za-z])[\w./~+-]+",
        "<url>",
    ),
    ("address", "arn:aws", r"\barn:aws[\w-]*:[\w*:/.+=@-]+", "<address>"),
    (
        "environment variable",
        r"=(?<=[A-Z0-9_]=)",
        r"(?<![A-Za-z0-9_])(?P<name>[A-Z_][A-Z0-9_]+)=(?!=)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;\"')]+)",
        _variable,
    ),
    ("mail address", "@", r"[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b", "<mail>"),
    (
        "host",
        rf"\.(?:{_TOP}|{_TOP.upper()}|{_OTHER_TOP})(?![\w(-])|localhost:\d",
        rf"(?<![A-Za-z0-9.])(?:(?P<host>(?:[A-Za-z0-9](?:[A-Za-z0-9-]{{0,61}}[A-Za-z0-9])?\.)+"
        rf"(?:{_TOP}|{_TOP.upper()}|{_OTHER_TOP}))(?![\w(-])(?!\.\w)|localhost(?=:\d+/))"
        r"(?P<tail>(?::\d+)?(?:/[\w.+@%~:/-]*)?)",
        _host,
    ),
    (
        "path",
        "%(?:25)*(?:2[Ff]|5[Cc])",
        r"[\w.+~:-]*(?:%(?:25)*(?:2F|3A|5C)[\w.+~:-]*(?:%[0-9A-Fa-f]{2}[\w.+~:-]*)*"
        r"|(?:%(?:25)*(?:2f|3a|5c)[\w.+~:-]+(?:%(?!(?:25)*(?:2f|3a|5c))[0-9A-Fa-f]{2}[\w.+~:-]*)*){2,})",
        _encoded,
    ),
    ("path", r"\A/", r"\A/(?:[^\"'\n/:]+/)+[^\"'\n:]*\Z", _path),
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
        rf"|(?:{_ROOTS})(?![\w.-]){_PART}*){_BLANKS}",
        _path,
    ),
    ("path", "~", rf"(?<![\w~])~[\w-]*/{_PART}[\w./+-]*{_BLANKS}", "<path>"),
    (
        "path",
        r"\\",
        r"(?:(?<![A-Za-z0-9])[A-Za-z]:\\[^\s\"'<>|:]+|\\\\[\w.-]+\\[\w.$\\-]+)"
        r"(?:(?: [^\s\"'<>|:\\/]+){1,3}\\[^\s\"'<>|:]*)*",
        _path,
    ),
    (
        "path",
        "-packages/",
        r"(?<![\w.+~@/-])(?:[\w.+~@-]+/+)+(?:site|dist)-packages/+",
        "",
    ),
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
        "bus address",
        rf":(?<={_HEX}:){_HEX}{{2}}\.[0-7]",
        r"(?<![\w:.])(?=[\d:]*[a-fA-F])[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](?![\w.])",
        "<bus>",
    ),
    (
        "MAC address",
        rf"\.(?<={_HEX}\.){_HEX}{{4}}\.{_HEX}{{4}}",
        rf"(?<![\w.])(?=[\d.]*[a-fA-F]){_HEX}{{4}}\.{_HEX}{{4}}\.{_HEX}{{4}}(?![\w.])",
        "<address>",
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
        rf"(?<![\w:.])(?:{_HEX}{{1,4}})?(?::{_HEX}{{0,4}}){{2,7}}(?:(?<=:\d)\d{{0,2}}(?:\.\d{{1,3}}){{3}})?"
        r"(?:%\w+)?(?![\w:])",
        _ipv6,
    ),
    (
        "IP address",
        "ip-",
        r"(?<![A-Za-z0-9])ip-\d{1,3}(?:-\d{1,3}){3}(?![\w-])",
        "<address>",
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
