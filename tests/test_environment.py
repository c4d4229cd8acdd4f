"""The description of the machine: operating system and processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness import environment


def test_the_system_has_its_release_and_no_name_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    release = {"PRETTY_NAME": "Ubuntu 24.04.3 LTS", "NAME": "Ubuntu", "VERSION_ID": "24.04"}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: release)
    monkeypatch.setattr("platform.release", lambda: "6.8.0-1057-acme")
    assert environment.operating_system() == {"os": "Ubuntu 24.04", "os_kernel": "6.8.0"}

    def missing() -> dict[str, str]:
        raise OSError

    monkeypatch.setattr("platform.freedesktop_os_release", missing)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.release", lambda: "unknown")
    assert environment.operating_system() == {"os": "Linux"}


def test_cores_are_those_of_all_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "".join(
            f"processor : {at}\nmodel name : AMD EPYC 9654\nphysical id : {at // 4}\n"
            f"core id : {at % 2}\n\n"
            for at in range(8)
        )
    )
    monkeypatch.setattr(environment, "CPU_INFO", str(info))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert environment.processor() == {"cpu": "AMD EPYC 9654", "cpu_cores": 4, "cpu_count": 8}
    info.write_text("")
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert environment.processor() == {"cpu": "arm", "cpu_count": 8}
