"""What is wrong with a file of certificates is said by its path, before any handshake."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from services.common.certificates import CertificateError, read_authorities, read_chain
from tests import certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates") / "valid")


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates") / "expired", days=-1)


def trouble(read, *paths: Path) -> tuple[Path, str]:
    """The file at fault, and what is said of it."""
    with pytest.raises(CertificateError) as caught:
        read(*paths)
    assert str(caught.value).startswith(f"{caught.value.path}: ")
    assert "\n" not in str(caught.value)
    return caught.value.path, str(caught.value).removeprefix(f"{caught.value.path}: ")


def test_good_files_are_taken_as_they_are(made: Path) -> None:
    """Bytes of the files; a bundle in which one authority has run out serves with the others."""
    chain, key = read_chain(made / "stream.crt", made / "stream.key")
    assert (chain, key) == ((made / "stream.crt").read_bytes(), (made / "stream.key").read_bytes())
    assert read_authorities(made / "ca.crt") == (made / "ca.crt").read_bytes()


def test_authorities_of_which_some_ran_out(made: Path, expired: Path, tmp_path: Path) -> None:
    """One that is valid is enough; none is an error that says when the first ended."""
    bundle = tmp_path / "bundle.crt"
    bundle.write_bytes((expired / "stream.crt").read_bytes() + (made / "ca.crt").read_bytes())
    assert read_authorities(bundle) == bundle.read_bytes()
    path, said = trouble(read_authorities, expired / "stream.crt")
    assert path == expired / "stream.crt"
    assert re.fullmatch(r"expired at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", said)


def test_a_date_is_that_of_openssl(expired: Path) -> None:
    """The end that is named is the certificate's."""
    _, said = trouble(read_chain, expired / "stream.crt", expired / "stream.key")
    command = [
        certificates.OPENSSL,
        "x509",
        "-in",
        expired / "stream.crt",
        "-noout",
        "-enddate",
        "-dateopt",
        "iso_8601",
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.strip().removeprefix("notAfter=").rstrip("Z") == said.removeprefix("expired at ").removesuffix(" UTC")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        ("", "holds no certificate in PEM"),
        ("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", "holds no certificate in PEM"),
        ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "holds no certificate in PEM"),
    ],
)
def test_no_certificate(made: Path, tmp_path: Path, content: str | None, said: str) -> None:
    """A file that is not there, is empty, or holds something else."""
    path = tmp_path / "x.crt"
    if content is not None:
        path.write_text(content)
    for read in (lambda: read_authorities(path), lambda: read_chain(path, made / "stream.key")):
        at_fault, why = trouble(read)
        assert at_fault == path
        assert re.fullmatch(said, why)


def test_a_key_that_does_not_fit(made: Path, tmp_path: Path) -> None:
    """Another's key, no key, and a key behind a password are told apart."""
    locked = tmp_path / "locked.key"
    command = [certificates.OPENSSL, "ec", "-in", made / "stream.key", "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for key, said in (
        (made / "engine.key", f"is not the key of {made / 'stream.crt'}"),
        (made / "ca.crt", "holds no private key in PEM"),
        (locked, "is encrypted; expected a key without a password"),
        (tmp_path, "cannot be read (Is a directory)"),
    ):
        assert trouble(read_chain, made / "stream.crt", key) == (key, said)
