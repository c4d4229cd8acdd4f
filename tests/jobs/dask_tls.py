"""A certificate for Dask's scheduler, workers and clients in tests."""

from __future__ import annotations

from pathlib import Path

from distributed import Security

PREFIX = "DASK_DISTRIBUTED__COMM__"


def tls_variables(folder: Path) -> dict[str, str]:
    """Write a certificate that is its own authority. Return the variables that select it."""
    made = Security.temporary()
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_text(made.tls_ca_file)
    key.write_text(made.tls_client_key)
    key.chmod(0o600)
    files = {"CERT": str(certificate), "KEY": str(key)}
    roles = {
        f"{PREFIX}TLS__{role}__{part}": path
        for role in ("SCHEDULER", "WORKER", "CLIENT")
        for part, path in files.items()
    }
    return {
        f"{PREFIX}REQUIRE_ENCRYPTION": "true",
        f"{PREFIX}TLS__CA_FILE": str(certificate),
        **roles,
    }
