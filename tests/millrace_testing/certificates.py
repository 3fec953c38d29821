"""Certificates of a throwaway authority, written where a `Tls` section of the configuration names them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme
from millrace_common.tls_config import PEERS

NAMES = ("127.0.0.1", "localhost", *(name for names in PEERS.values() for name in names))


class Authority:
    """`tls(folder)` writes a certificate with its key and the authority's own into the folder."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def tls(self, folder: Path, *names: str, trusts: Sequence[Authority] = (), **settings: object) -> dict[str, object]:
        """The keys of a `Tls` section. Files that are there are replaced, each at once. `trusts`: other authorities,
        beside this one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        issued = self._ca.issue_cert(*(names or NAMES))
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        paths = {"cert": folder / "tls.crt", "key": folder / "tls.key", "ca": folder / "ca.crt"}
        contents = {
            "cert": chain,
            "key": issued.private_key_pem.bytes(),
            "ca": b"".join(one._ca.cert_pem.bytes() for one in (self, *trusts)),
        }
        for name, path in paths.items():
            draft = path.with_suffix(".new")
            draft.write_bytes(contents[name])
            os.replace(draft, path)
        return {**{name: str(path) for name, path in paths.items()}, **settings}


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each HTTP client reads all certificate authorities of the machine, also for http://. Here is one to read."""
    file = tmp_path_factory.mktemp("authorities") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield
