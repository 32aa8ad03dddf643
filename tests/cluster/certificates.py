"""Certificates of CAs that tests make, as files."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme

from actorflow.rendezvous.tls import TlsFiles


class Authority:
    """A CA in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)
        self._made = 0

    def files(self, *names: str, common_name: str | None = None, days: int = 30) -> TlsFiles:
        """A certificate with these names and its key; ``days`` below 0: it has expired."""
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        begun = until - datetime.timedelta(days=60)
        made = self._ca.issue_cert(*names, common_name=common_name, not_before=begun, not_after=until)
        self._made += 1
        cert, key = self._folder / f"cert{self._made}.pem", self._folder / f"key{self._made}.pem"
        made.cert_chain_pems[0].write_to_path(cert)
        for more in made.cert_chain_pems[1:]:
            more.write_to_path(cert, append=True)
        key.touch(mode=0o600)
        made.private_key_pem.write_to_path(key)
        return TlsFiles(str(self.file), str(cert), str(key))
