"""Mutual TLS between nodes: the files of a node, what can be wrong with them, and what a peer's certificate says.

The run's CA alone vouches: whoever has a certificate that it has signed may join, and is taken for any rank or
launcher, whatever names are in the certificate.  For nodes reach each other by addresses that a scheduler hands out,
and every rank of a run may do the same, so that names would keep nobody out.  So the CA has to be the run's own, or the
team's.

gRPC checks a name nevertheless.  So a dialler first asks the other side for its certificate, and has gRPC expect a name
that is in it; gRPC checks who has signed it once more.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actorflow.rendezvous.options import TLS_CA, TLS_CERT, TLS_KEY
from actorflow_compiler.core.errors import ClusterError

if TYPE_CHECKING:  # where there is no TLS, no process has to load it
    import ssl

__all__ = ["TlsFiles", "client_hello", "hint_of_server", "name_of_server", "speaks_tls", "tls_files"]

ANSWER = 5.0  # seconds for another side to answer
ATTEMPTS, PAUSE = 3, 0.3  # with one that hangs up, and seconds between them
FLAGS = f"{TLS_CA.flag}, {TLS_CERT.flag} and {TLS_KEY.flag}"
_PROTOCOL = ["h2"]  # gRPC speaks HTTP/2


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a node's files, all in PEM."""

    ca: str  # the certificates of the run's CA
    cert: str  # this node's certificate, and those between it and the CA's, if there are any
    key: str  # its private key, without a passphrase

    def read(self) -> tuple[bytes, bytes, bytes]:
        """The contents of the three; raises ClusterError where one cannot be read."""
        ca, cert, key = (_read(option.flag, path) for option, path in zip(_OPTIONS, self.paths, strict=True))
        return ca, cert, key

    @property
    def paths(self) -> tuple[str, str, str]:
        """CA, certificate and key."""
        return self.ca, self.cert, self.key

    def check(self, warn: Callable[[str], object]) -> None:
        """Check that the files fit each other and are valid today; ``warn`` gets texts about what is merely unwise.

        Raises ClusterError for a file that cannot be read or is none of these, a key with a passphrase or of another
        certificate, and a certificate that the CA has not signed, that is not valid now, or not for both sides.
        """
        import ssl

        self.read()
        mode = os.stat(self.key).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            warn(
                f"the private key {self.key} can be read by other users of this machine (mode {stat.S_IMODE(mode):o}): "
                f"chmod 600 {self.key}"
            )
        client, server = self.context(server=False), self.context(server=True)
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (
            client.wrap_bio(to_client, to_server, server_side=False),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        done: set[ssl.SSLObject] = set()
        for _ in range(8):  # flights of a handshake, of which there are fewer
            for side in sides:
                if side in done:
                    continue
                try:
                    side.do_handshake()
                    done.add(side)
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as error:
                    raise ClusterError(
                        f"{TLS_CERT.flag} {self.cert} is no certificate with which this run can be joined: "
                        f"{_words(error)}. {TLS_CA.flag} {self.ca} has to have signed it, for servers and for clients."
                    ) from None
        _name(sides[0].getpeercert() or {}, f"{TLS_CERT.flag} {self.cert}")

    def context(self, *, server: bool) -> ssl.SSLContext:
        """What Python's TLS needs; raises ClusterError for files that are wrong."""
        import ssl

        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        found.check_hostname = False
        found.verify_mode = ssl.CERT_REQUIRED
        found.set_alpn_protocols(_PROTOCOL)
        try:
            found.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise ClusterError(f"{TLS_CA.flag} {self.ca} has no certificates in PEM ({_words(error)})") from None
        try:
            found.load_cert_chain(self.cert, self.key, _no_passphrase)
        except _Encrypted:
            raise ClusterError(
                f"{TLS_KEY.flag} {self.key} is encrypted with a passphrase, for which nobody can be asked; give the "
                "key without one, readable by you alone"
            ) from None
        except (OSError, ValueError) as error:
            if "MISMATCH" in str(error):
                raise ClusterError(
                    f"{TLS_KEY.flag} {self.key} is not the key of the certificate {TLS_CERT.flag} {self.cert}; give "
                    "the two that were made together"
                ) from None
            raise ClusterError(
                f"{TLS_CERT.flag} {self.cert} and {TLS_KEY.flag} {self.key} are no certificate and no private key in "
                f"PEM ({_words(error)})"
            ) from None
        return found


_OPTIONS = (TLS_CA, TLS_CERT, TLS_KEY)


class _Encrypted(Exception):
    """The key has a passphrase."""


def _no_passphrase() -> str:
    raise _Encrypted


def _read(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ClusterError(f"{flag} {path} cannot be read ({error.strerror})") from None


def tls_files(ca: str | None, cert: str | None, key: str | None) -> TlsFiles | None:
    """The files, None where none is named; raises ClusterError where only some are."""
    given = dict(zip(_OPTIONS, (ca, cert, key), strict=True))
    missing = [option for option, path in given.items() if not path]
    if len(missing) == len(given):
        return None
    if missing:
        there = " and ".join(f"{option.flag} {path}" for option, path in given.items() if path)
        lacks = " and ".join(f"{option.flag} ({option.variable})" for option in missing)
        raise ClusterError(
            f"{there} was found without {lacks}: TLS needs the run's CA, this node's certificate and its private key"
        )
    return TlsFiles(str(ca), str(cert), str(key))


def name_of_server(files: TlsFiles, address: str) -> str:
    """A name in the certificate of what listens at ``host:port``, which has accepted ours.

    Raises OSError where nothing listens or answers there (yet), and ClusterError where the other side has no
    certificate of the run's CA, refuses ours, or does not speak TLS.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _name(_certificate(files, address), f"the certificate of {address}")
        except _HungUp:  # or its process has just ended
            if attempt < ATTEMPTS - 1:
                time.sleep(PAUSE)
    raise ClusterError(
        f"{address} hung up on seeing this node's certificate, {TLS_CERT.flag} {files.cert}: its {TLS_CA.flag} has to "
        "have signed it, and it has to be valid by its clock. Give every node certificates of the same CA."
    )


def _certificate(files: TlsFiles, address: str) -> object:
    """The certificate of what listens there, as Python reads it, once ours is accepted; see ``name_of_server``."""
    import ssl

    with _connection(address) as plain:
        try:
            with files.context(server=False).wrap_socket(plain) as secure:
                _await_word(secure)
                return secure.getpeercert() or {}
        except ssl.SSLCertVerificationError as error:
            raise ClusterError(
                f"the certificate of {address} is not one of this run: {error.verify_message}. {TLS_CA.flag} "
                f"{files.ca} of this node has to have signed it: give every node certificates of the same CA."
            ) from None
        except ssl.SSLError as error:
            if "ALERT" in str(error.reason):
                raise ClusterError(
                    f"{address} refused this node's certificate, {TLS_CERT.flag} {files.cert}: {_words(error)}. Its "
                    f"{TLS_CA.flag} has to have signed it: give every node certificates of the same CA, valid today."
                ) from None
            raise NoTls(
                f"what listens at {address} does not speak TLS, and this node was given {FLAGS}; give them on every "
                f"node, or on none ({_words(error)})"
            ) from None


class _HungUp(Exception):
    """The other side has closed the connection after the handshake."""


def _await_word(secure: ssl.SSLSocket) -> None:
    """Wait for the first byte of a server, which comes once it has looked at our certificate."""
    import ssl

    try:
        if secure.recv(1):
            return
    except (ConnectionError, ssl.SSLEOFError):
        pass
    raise _HungUp


class NoTls(ClusterError):
    """The other side does not speak TLS."""


def speaks_tls(address: str) -> bool:
    """Whether what listens at ``host:port`` speaks TLS; False where nothing answers."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is only asked what it is
    context.set_alpn_protocols(_PROTOCOL)
    try:
        with _connection(address) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error.reason)
    except OSError:
        return False


def hint_of_server(address: str) -> str:
    """What a node without TLS is told where what listens at ``host:port`` wants it; else empty."""
    if not speaks_tls(address):
        return ""
    return f"what listens at {address} speaks TLS: give this node {FLAGS} too, with a certificate of the same CA"


def client_hello() -> bytes:
    """The first bytes of a client, to which a TLS server answers whatever it thinks of the client."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(_PROTOCOL)
    said = ssl.MemoryBIO()
    side = context.wrap_bio(ssl.MemoryBIO(), said)
    with suppress(ssl.SSLWantReadError):
        side.do_handshake()
    return said.read()


def _connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), ANSWER)


def _words(error: Exception) -> str:
    """An error of OpenSSL's for people: "certificate has expired", "tlsv1 alert unknown ca"."""
    message = getattr(error, "verify_message", "") or getattr(error, "reason", "") or getattr(error, "strerror", "")
    return str(message or error).replace("_", " ").lower()


def _name(certificate: object, whose: str) -> str:
    """A name that gRPC finds in a certificate: of its alternative names, else its common name."""
    found: dict[str, object] = dict(certificate) if isinstance(certificate, dict) else {}
    others = [(str(kind), str(name)) for kind, name in found.get("subjectAltName", ())]  # type: ignore[attr-defined]
    for kind in ("DNS", "IP Address"):
        for known, name in others:
            if known == kind:
                return name.replace("*.", "any.", 1) if name.startswith("*.") else name
    subject = [pair for part in found.get("subject", ()) for pair in part]  # type: ignore[attr-defined]
    common = [str(value) for key, value in subject if key == "commonName"]
    if others or not common:
        raise ClusterError(f"{whose} has no name: it needs a subjectAltName, such as DNS:actorflow")
    return common[0]
