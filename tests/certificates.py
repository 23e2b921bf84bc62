"""A CA for a test, and certificates of it, made by the openssl program."""

import subprocess
from pathlib import Path


def make_ca(folder: Path, name: str = "ca") -> Path:
    """A CA; its certificate is `<name>.pem`, its key beside it."""
    path = folder / f"{name}.pem"
    _openssl("req", "-x509", "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", path)
    return path


def make_certificate(folder: Path, name: str, ca: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 signed by `ca`, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl(
        "req", "-x509", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-addext",
        "basicConstraints=critical,CA:FALSE", "-CA", ca, "-CAkey", ca.with_suffix(".key"), "-keyout", key, "-out",
        certificate,
    )  # fmt: skip
    return certificate, key


def _openssl(*arguments: str | Path) -> None:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(["openssl", *map(str, arguments), *curve], check=True, capture_output=True)
