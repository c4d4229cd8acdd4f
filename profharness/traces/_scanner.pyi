from typing import Any

FORM: int

def parents(thread: Any, start: Any, stop: Any, parent: Any) -> None: ...

class Scanner:
    def __new__(
        cls,
        categories: bytes,
        roles: bytes,
        numbers: bytes,
        parts: bytes,
        op_keys: bytes,
        module: bytes,
    ) -> Scanner: ...
    def scan(
        self, text: bytes | memoryview, begin: int, end: int, rows: Any
    ) -> tuple[int, tuple[int, ...]]: ...
    def arguments(self, text: bytes | memoryview, rows: Any) -> None: ...
    def texts(self, first: int) -> list[bytes]: ...
