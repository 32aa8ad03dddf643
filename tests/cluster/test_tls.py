"""Nodes that speak TLS: who is let in, what the others are told, and that nothing else differs."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.control import channels
from actorflow.launch.node_meeting import RemoteMeeting
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.script_request import RunShape, check_token
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket
from actorflow.rendezvous.tls import TlsFiles, client_hello, name_of_server, speaks_tls, tls_files
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb
from actorflow_protos.runtime_pb2_grpc import PeerStub
from cluster.certificates import Authority
from cluster.ranks import LIMIT, Ranks, Word, free_port

Make = Callable[..., Settings]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def with_files(settings: Settings, files: TlsFiles | None) -> Settings:
    """Of a run of one rank on each node, of which each has its own files."""
    own = {} if files is None else {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}
    return replace(settings, devices=1, nnodes=settings.world, node=settings.rank, local_rank=0, **own)


def join(ranks: Ranks, settings: Make, *files: TlsFiles | None, **changes: Any) -> list[Any]:
    for rank, own in enumerate(files):
        ranks.make(with_files(settings(rank, len(files), **changes), own))
    return ranks.each(lambda cluster: cluster.join())


def test_the_ca_alone_vouches_and_no_token_is_needed(ranks: Ranks, settings: Make, authority: Authority) -> None:
    files = [authority.files(*names) for names in (("node-a",), ("10.0.0.7", "node-b"), ("*.cluster",))]
    files.append(authority.files(common_name="a name of the older kind"))
    assert join(ranks, settings, *files, token="") == [None] * 4
    ranks.clusters[3].serve(Word, lambda _: [b"served"])
    assert ranks.each(lambda cluster: cluster.connect(range(4))) == [None] * 4
    assert ranks.each(lambda cluster: cluster.pull(3, Word("k"))) == [b"served"] * 4
    assert sorted(ranks.each(lambda cluster: cluster.store().add("n", 1))) == [1, 2, 3, 4]
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 4


def test_where_a_token_is_given_too_both_are_needed(ranks: Ranks, settings: Make, authority: Authority) -> None:
    ranks.make(with_files(settings(0, 2), authority.files("a"))).begin()
    guest = ranks.make(with_files(settings(1, 2, token="guess"), authority.files("b")))
    (other,) = ranks.apart(guest.join)
    assert "turned rank 1 away: their tokens differ" in str(other)


@pytest.mark.parametrize("master", ["tls", "plain"])
def test_a_node_that_alone_uses_tls_or_does_not_is_told_so_at_once(
    ranks: Ranks, settings: Make, authority: Authority, give_up: Callable[[], None],
    capsys: pytest.CaptureFixture[str], master: str,
) -> None:  # fmt: skip
    own = authority.files("a")
    files = (own, None) if master == "tls" else (None, own)
    ranks.make(with_files(settings(0, 2), files[0])).begin()
    ranks.make(with_files(settings(1, 2), files[1]))
    (other,) = ranks.apart(ranks.clusters[1].join)
    give_up()
    (found,) = ranks.apart(ranks.clusters[0].join)
    assert isinstance(other, ClusterError)
    assert isinstance(found, ClusterError)
    if master == "tls":
        assert "speaks TLS: give this node --tls-ca, --tls-cert and --tls-key too" in str(other)
        assert "This run uses TLS: who has no certificate of its CA is refused" in str(found)
    else:
        assert "does not speak TLS, and this node was given --tls-ca" in str(other)
        assert "Callers from 127.0.0.1 were turned away, for using TLS, which this node does not" in str(found)
        assert "rank 0 refused a caller from 127.0.0.1, for using TLS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("another CA", "the certificate of .* is not one of this run: unable to get local issuer certificate"),
        ("expired here", "hung up on seeing this node's certificate|refused this node's certificate"),
        ("expired there", "the certificate of .* is not one of this run: certificate has expired"),
    ],
    ids=lambda one: one if len(one) < 20 else "",
)
def test_a_node_whose_certificate_does_not_do_is_told_why_at_once(
    ranks: Ranks, settings: Make, authority: Authority, tmp_path: Path, case: str, text: str
) -> None:
    good, old = authority.files("a"), authority.files("b", days=-1)
    mine, theirs = {
        "another CA": (Authority(tmp_path / "other").files("c"), good),
        "expired here": (old, good),
        "expired there": (good, old),
    }[case]
    ranks.make(with_files(settings(0, 2), theirs)).begin()
    guest = ranks.make(with_files(settings(1, 2), mine))
    (other,) = ranks.apart(guest.join)
    with pytest.raises(ClusterError, match=text):
        raise other


def test_a_caller_without_a_certificate_gets_no_word_in(ranks: Ranks, settings: Make, authority: Authority) -> None:
    assert join(ranks, settings, authority.files("a"), authority.files("b"), token="") == [None] * 2
    address = ranks.clusters[0]._control_plane.own.address
    ca = authority.file.read_bytes()
    named = [("grpc.ssl_target_name_override", "a")]
    for channel in (
        grpc.insecure_channel(address),
        grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options=named),
    ):
        with channel, pytest.raises(grpc.RpcError) as e:
            PeerStub(channel).Store(pb.StoreCall(verb="count"), timeout=LIMIT)
        assert e.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


def test_a_lost_peer_is_probed_by_the_words_of_tls(ranks: Ranks, settings: Make, authority: Authority) -> None:
    assert join(ranks, settings, authority.files("a"), authority.files("b")) == [None] * 2
    plane = ranks.clusters[1]._control_plane
    address = ranks.clusters[0]._control_plane.own.address
    assert asyncio.run(channels.probe(address, 5.0, 5.0, tls=True)) is FailureKind.BROKEN
    assert asyncio.run_coroutine_threadsafe(plane._answers(address), ranks.clusters[1]._loop).result(LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel takes the call, and nobody speaks
        there = f"127.0.0.1:{stopped.getsockname()[1]}"
        assert asyncio.run(channels.probe(there, 5.0, 0.1, tls=True)) is FailureKind.STOPPED
        asked = asyncio.run_coroutine_threadsafe(plane._answers(there), ranks.clusters[1]._loop)
        assert not asked.result(LIMIT)
    assert asyncio.run(channels.probe(there, 5.0, 0.1, tls=True)) is FailureKind.KILLED
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


def test_what_listens_is_known_by_how_it_answers(ranks: Ranks, settings: Make, authority: Authority) -> None:
    files = authority.files("node-a")
    assert client_hello()[:1] == b"\x16"  # a handshake
    nobody = f"127.0.0.1:{free_port()}"
    assert not speaks_tls(nobody)
    with pytest.raises(OSError, match="refused"):
        name_of_server(files, nobody)
    assert join(ranks, settings, files, authority.files("node-b")) == [None] * 2
    address = ranks.clusters[0]._control_plane.own.address
    assert speaks_tls(address)
    assert name_of_server(authority.files("x"), address) == "node-a"
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


def broken(authority: Authority, other: Authority, folder: Path, case: str) -> TlsFiles:
    files, text = authority.files("a"), folder / "text"
    text.write_text("no certificate")
    return {
        "no file": replace(files, ca=str(folder / "none.pem")),
        "a folder": replace(files, cert=str(folder)),
        "no CA": replace(files, ca=str(text)),
        "no certificate": replace(files, cert=str(text)),
        "no key": replace(files, key=str(text)),
        "another key": replace(files, key=authority.files("b").key),
        "another CA": replace(files, ca=str(other.file)),
        "expired": authority.files("a", days=-1),
        "nameless": authority.files("x@example.org"),
        "passphrase": replace(files, key=str(encrypted(Path(files.key), folder))),
    }[case]


def encrypted(key: Path, folder: Path) -> Path:
    from cryptography.hazmat.primitives import serialization as s

    loaded = s.load_pem_private_key(key.read_bytes(), None)
    path = folder / "encrypted.pem"
    path.write_bytes(loaded.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"a word")))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no file", r"--tls-ca .*none.pem cannot be read \(No such file or directory\)"),
        ("a folder", r"--tls-cert .* cannot be read \(Is a directory\)"),
        ("no CA", "--tls-ca .* has no certificates in PEM"),
        ("no certificate", "--tls-cert .* and --tls-key .* are no certificate and no private key in PEM"),
        ("no key", "--tls-cert .* and --tls-key .* are no certificate and no private key in PEM"),
        ("another key", "--tls-key .* is not the key of the certificate --tls-cert .*; give the two that were made"),
        ("another CA", "no certificate with which this run can be joined: unable to get local issuer certificate"),
        ("expired", "no certificate with which this run can be joined: certificate has expired"),
        ("nameless", "has no name: it needs a subjectAltName, such as DNS:actorflow"),
        ("passphrase", "is encrypted with a passphrase, for which nobody can be asked"),
    ],
    ids=lambda one: one if len(one) < 20 else "",
)
def test_files_that_do_not_do_are_an_error_before_anything_starts(
    authority: Authority, tmp_path: Path, case: str, text: str
) -> None:
    files = broken(authority, Authority(tmp_path / "other"), tmp_path, case)
    with pytest.raises(ClusterError, match=text):
        files.check(lambda _: None)


def test_a_private_key_that_others_can_read_is_warned_of(authority: Authority) -> None:
    files, said = authority.files("a"), list[str]()
    files.check(said.append)
    assert said == []
    os.chmod(files.key, 0o640)
    files.check(said.append)
    assert said == [
        f"the private key {files.key} can be read by other users of this machine (mode 640): chmod 600 {files.key}"
    ]


def test_all_three_are_needed(authority: Authority, tmp_path: Path) -> None:
    files = authority.files("a")
    assert tls_files(None, "", None) is None
    assert tls_files(*files.paths) == files
    (tmp_path / "script.py").write_text("")
    run = ["run", str(tmp_path / "script.py"), "--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "1"]
    done = CliRunner().invoke(main, [*run, "--tls-ca", files.ca], env={"ACTORFLOW_TLS_KEY": files.key})
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert "was found without --tls-cert (ACTORFLOW_TLS_CERT): TLS needs the run's CA" in said
    contradicts = [*run, "--insecure", "--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]
    done = CliRunner().invoke(main, contradicts)
    assert "--insecure contradicts --tls-ca" in " ".join(done.output.split())


def test_certificates_are_enough_for_a_script_that_names_its_nodes(authority: Authority) -> None:
    shape = RunShape(1, 2, 0, "10.0.0.1", 1, False, "")
    with pytest.raises(ClusterError, match="ACTORFLOW_TLS_CA, ACTORFLOW_TLS_CERT and ACTORFLOW_TLS_KEY"):
        check_token(shape, "")
    check_token(shape, authority.files("a").cert)


def test_ranks_read_the_paths_from_their_environment_and_one_node_needs_none(authority: Authority) -> None:
    files = authority.files("a")
    several = Settings(nnodes=2, devices=1, tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)
    assert Settings.from_env(several.to_env()).tls == files
    assert replace(several, nnodes=1).tls is None
    assert Settings.from_env(Settings(nnodes=2).to_env()).tls is None


SCRIPT = """
import os
import actorflow as flow
from torch import distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print("rank", flow.env.rank(), "of", flow.env.world_size(), os.environ["ACTORFLOW_TLS_CERT"][-9:], flush=True)
"""


@pytest.mark.parametrize("restarts", [(), ("--max-restarts", "1")], ids=["ranks", "launchers"])
def test_two_launchers_run_with_certificates_alone(
    start: Callable[..., Any], authority: Authority, tmp_path: Path, restarts: tuple[str, ...]
) -> None:
    port, runs = free_port(), []
    for node, files in enumerate((authority.files("a"), authority.files("b"))):
        place = ("--nnodes", "2", "--devices", "1", "--node-rank", str(node), "--master-addr", "127.0.0.1")
        names = ("--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key)
        runs.append(start(SCRIPT, *place, "--master-port", str(port), *names, *restarts, python=warm.python()))
    assert [run.wait() for run in runs] == [0, 0], "".join(run.output for run in runs)
    assert "rank 0 of 2 cert1.pem" in runs[0].output
    assert "rank 1 of 2 cert2.pem" in (tmp_path / "logs0" / "rank1.stdout.log").read_text()  # gathered on node 0
    assert "refused a caller" not in runs[0].output


def test_a_launcher_is_told_at_once_that_node_0s_speaks_tls(ranks: Ranks, settings: Make, authority: Authority) -> None:
    master = ranks.make(with_files(settings(0, 2), authority.files("a")))
    master.begin()
    found: list[Exception] = []

    def attend() -> None:
        try:
            RemoteMeeting(own_ticket(master.settings), 1, master.settings.master_address, "secret", LIMIT)
        except ClusterError as error:
            found.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    thread.join(LIMIT)
    assert "speaks TLS: give this node --tls-ca" in str(found[0])
