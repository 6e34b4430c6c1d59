"""What docs/explanation/threat-model.md says, sentence by sentence; each test names the sentence in its docstring."""

from __future__ import annotations

import ast
import json
import logging
import os
import pickle
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest

from routeplane import new_stream, open_stream
from routeplane.archive import open_archive, save_archive
from routeplane.archive.store import LocalFolder
from routeplane.capture.vllm.interface import RequestOptions, WriterConfig
from routeplane.errors import ErrorKind, RouteplaneError, UsageError
from routeplane.fleet.endpoints import Endpoints, reserve
from routeplane.fleet.engine import EngineConfig
from routeplane.fleet.environment import EnvironmentConfig
from routeplane.record.interfaces import BlockName, Position, RouteTicket
from routeplane.record.policy import QuarantineOptions, ReadPolicy
from routeplane.record.spans import RecordKey
from routeplane.stream import flight, folder, listen
from routeplane.stream.blocks import check_name
from routeplane.stream.sockets import parse_address
from routeplane.testing.builders import SPEC, facts, sample

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-of-a-role"

# ----------------------------------------------------------------------------------------------------------------------
# Listeners
# ----------------------------------------------------------------------------------------------------------------------


def test_a_stream_listens_on_the_loopback_unless_a_host_is_spelled_out() -> None:
    """``tcp://:port`` is 127.0.0.1, and nothing else stands for all interfaces than their address."""
    assert ("127.0.0.1", 0) == parse_address("tcp://:0").place
    with listen("tcp://:0") as listener:
        assert "127.0.0.1" == listener._server.getsockname()[0]
    assert ("0.0.0.0", 0) == parse_address("tcp://0.0.0.0:0").place


@pytest.mark.parametrize("address", ["grpc://0.0.0.0:0", "grpc://[::]:0", "grpc://:0", "grpc://10.0.0.1:0"])
@pytest.mark.parametrize("tokens", [None, flight.Tokens(writer="w", reader="r")])
def test_flight_serves_others_only_with_tokens_and_tls(tmp_path: Path, address: str, tokens: Any) -> None:
    """Another address than the loopback needs both; there is no option that turns this off."""
    with pytest.raises(UsageError, match="tokens and a certificate"):
        flight.Server(tmp_path, address=address, tokens=tokens)


def test_an_engines_endpoint_listens_on_the_loopback_unless_a_host_is_spelled_out() -> None:
    """The default host of an engine is 127.0.0.1; an empty host is refused instead of meaning all interfaces."""
    assert "127.0.0.1" == EngineConfig(model="m", spec=None).host
    with pytest.raises(UsageError, match="a host to bind"):
        reserve("", (18_700, 18_800), advertise="node-1")


@cache
def package_nodes() -> list[tuple[str, ast.Call | ast.ClassDef]]:
    """Calls and classes of every module of the package, with its path in it."""
    return [
        (path.relative_to(ROOT / "routeplane").as_posix(), node)
        for path in sorted((ROOT / "routeplane").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call | ast.ClassDef)
    ]


def listening_calls() -> Iterator[str]:
    """Modules of the package that bind, listen or serve."""
    for path, node in package_nodes():
        if isinstance(node, ast.ClassDef):
            serves = any(ast.unparse(base) in ("fl.FlightServerBase", "ThreadingHTTPServer") for base in node.bases)
        else:
            serves = isinstance(node.func, ast.Attribute) and node.func.attr in ("bind", "create_server")
        if serves:
            yield path


def test_no_other_module_listens() -> None:
    """The page's table has every listener of the library."""
    page = (ROOT / "docs" / "explanation" / "threat-model.md").read_text(encoding="utf-8")
    found = set(listening_calls())
    assert {"stream/sockets.py", "stream/flight.py", "fleet/endpoints.py", "fleet/gym_servers.py"} == found
    assert not {name for name in found if f"`{name}`" not in page}


# ----------------------------------------------------------------------------------------------------------------------
# Secrets
# ----------------------------------------------------------------------------------------------------------------------


def with_secrets() -> list[Any]:
    """Every value of the library that holds a secret, or options of another library that may."""
    additional = {"routeplane": {"place": "/p", "run": "r", "options": {"access": SECRET}}}
    return [
        flight.Tokens(writer=SECRET, reader=SECRET),
        flight.Access(token=SECRET),
        EngineConfig(model="m", spec=None, options={"api_key": [SECRET]}),
        EnvironmentConfig(endpoints=Endpoints(), require_routes=False, settings={"policy_api_key": SECRET}),
        WriterConfig.from_additional(additional),
        flight._Client("grpc://127.0.0.1:1", flight.Access(token=SECRET)),
    ]


@pytest.mark.parametrize("value", with_secrets(), ids=lambda value: type(value).__name__)
def test_no_secret_in_a_repr(value: object) -> None:
    """``repr``, ``str`` and an f-string of a value with a secret do not hold it."""
    assert SECRET not in f"{value!r} {value} {[value]}"


def test_no_secret_in_errors_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A refused token, and a configuration that is refused, are told of without their secrets."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    tokens = flight.Tokens(writer=SECRET, reader=f"{SECRET}-r")
    with flight.Server(tmp_path / "place", tokens=tokens) as server:
        for token in (f"{SECRET}-r", f"{SECRET}-wrong"):
            with pytest.raises(RouteplaneError) as caught:
                flight.open_writer(server.place, SPEC, run="r", producer="p", access=flight.Access(token=token))
            said.append(str(caught.value))
    for given in ({"place": "/p", "options": {"access": SECRET}}, {"place": "/p", "run": "r", SECRET[:2]: SECRET}):
        with pytest.raises(UsageError) as refused:
            WriterConfig.from_additional({"routeplane": given, "other": SECRET})
        said.append(str(refused.value))
    with pytest.raises(UsageError) as refused:
        WriterConfig.from_additional({"other": SECRET})
    said.append(str(refused.value))
    assert SECRET not in " ".join(said) + caplog.text


def test_tickets_hold_no_secret_and_no_path() -> None:
    """A ticket names a stream, a key, a call, a range and a checksum; nothing else is taken."""
    ticket = RouteTicket(stream="run", key=RecordKey("s", 0, 0), call_id="c", start=0, stop=1, checksum=1)
    document = json.loads(ticket.to_json())
    assert {"call", "checksum", "key", "start", "stop", "stream"} == set(document)
    with pytest.raises(UsageError):
        RouteTicket.from_json(json.dumps({**document, "path": "/etc/passwd"}))


# ----------------------------------------------------------------------------------------------------------------------
# Names, paths and code
# ----------------------------------------------------------------------------------------------------------------------

STRANGE = ["..", "../x", "/etc/passwd", "a/b", "", ".hidden", "x\0y", "x" * 129, "a b", "é"]


@pytest.mark.parametrize("name", STRANGE)
def test_no_name_leads_out_of_a_place(tmp_path: Path, name: str) -> None:
    """Names of runs, producers and groups are letters, digits, ``_ . -``, also in files and requests."""
    with pytest.raises(UsageError):
        check_name(name, "producer")
    place = tmp_path / "place"
    with folder.open_writer(place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(0))
    with folder.open_reader(place, producers=1) as reader:
        with pytest.raises(RouteplaneError):
            reader.open(BlockName(name, 0))
        with pytest.raises(RouteplaneError):
            list(reader.names(position=Position(place=reader.position().place, next={name: 1})))
    assert {place} == set(tmp_path.iterdir())


#: Modules that import by a dotted name, and who gives it: none of them is data.
DOTTED = {
    "__init__.py": "this package's own modules",
    "capture/http/middleware.py": "the operator of the server (sink=)",
    "capture/vllm/__init__.py": "this package's own modules",
    "capture/vllm/engine_writer.py": "the operator of the engine (additional_config)",
    "capture/vllm/interface.py": "this package's own table of vLLM's names",
    "fleet/engine.py": "the operator of the fleet (EngineConfig)",
    "fleet/environment.py": "the operator of the fleet (factory)",
    "fleet/__init__.py": "this package's own modules",
    "batch/__init__.py": "this package's own modules",
    "inspect/__init__.py": "this package's own modules",
    "testing/contracts/__init__.py": "this package's own modules",
}
#: Modules that unpickle, and what.
UNPICKLED = {
    "fleet/environment.py": "a tokenizer, from the actor that starts it",
    "inspect/ray_data.py": "statistics, from the tasks that it started",
    "testing/contracts/carrier_contract.py": "a reader that the test pickled",
}


def calls_of(names: tuple[str, ...]) -> set[str]:
    """Modules of the package that call one of these functions."""
    return {path for path, node in package_nodes() if isinstance(node, ast.Call) and ast.unparse(node.func) in names}


def test_no_dotted_name_comes_from_data() -> None:
    """A dotted name is followed where an operator gives it; every such module stands in the table above."""
    assert set(DOTTED) == calls_of(("import_module", "importlib.import_module", "__import__"))
    assert set() == calls_of(("eval", "exec", "compile", "os.system"))


def test_no_pickle_is_read_from_data() -> None:
    """Unpickled is what this program's own processes made; numpy and torch files are read without pickles."""
    names = ("pickle.loads", "pickle.load", "cloudpickle.loads", "marshal.loads", "dill.loads")
    assert set(UNPICKLED) == calls_of(names)
    for path, node in package_nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "torch.load"):
            given = {item.arg: ast.unparse(item.value) for item in node.keywords}
            assert "False" == given.get("allow_pickle") or "True" == given.get("weights_only"), path


def test_a_request_names_no_factory_and_no_path() -> None:
    """What an HTTP client may say to the writer inside an engine is names, numbers, switches, and rows to follow."""
    names = {"capture", "inline", "sample_id", "attempt", "group", "weights_version", "follow"}
    assert names == set(RequestOptions.__slots__)
    for name in ("carrier", "place", "options", "sink"):
        with pytest.raises(UsageError):
            RequestOptions.from_extra_args({"routeplane": json.dumps({name: "os.system"})})


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o077, 0o027])
def test_files_have_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    """Streams, blocks, control files, locks, archives and quarantines: 0666 and folders 0777, less the umask."""
    before = os.umask(umask)
    try:
        with new_stream(tmp_path / "a.arrows", SPEC) as sink:
            sink.write(sample(0))
        with folder.open_writer(tmp_path / "place", SPEC, run="run", producer="p") as writer:
            writer.write(sample(0))
        with folder.open_reader(tmp_path / "place", producers=1) as reader:
            list(reader)
        save_archive([sample(0)], tmp_path / "archive", spec=SPEC)
    finally:
        os.umask(before)
    rights = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()}
    assert {0o666 & ~umask} == rights
    assert {0o777 & ~umask} == folders


def test_a_quarantine_without_a_path_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged records are kept in a temporary file that no other user sees, unless a path is given."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert QuarantineOptions().path is None
    data = tmp_path / "a.arrows"
    with new_stream(data, SPEC) as sink:
        sink.write(sample(0))
    changed = bytearray(data.read_bytes())
    changed[len(changed) * 2 // 3] ^= 1
    with open_stream(bytes(changed), on_corrupt="quarantine") as reader:
        list(reader)
    assert ["a.arrows"] == sorted(path.name for path in tmp_path.iterdir())
    assert ReadPolicy().on_corrupt == "raise"


# ----------------------------------------------------------------------------------------------------------------------
# Who can do what
# ----------------------------------------------------------------------------------------------------------------------


def test_a_consumer_acknowledges_for_its_own_group_alone(tmp_path: Path) -> None:
    """One group's reader frees no block that another group has not acknowledged."""
    place = tmp_path / "place"
    with folder.open_writer(place, SPEC, run="run", producer="p", groups=("a", "b")) as writer:
        writer.write(sample(0))
    with folder.open_reader(place, producers=1, group="a") as reader:
        assert facts([sample(0)]) == facts(list(reader))
    with folder.open_reader(place, producers=1, group="b") as reader:
        assert facts([sample(0)]) == facts(list(reader))


def test_checksums_are_not_signatures(tmp_path: Path) -> None:
    """Who may write a file can write other routes under right checksums: legal rows of a stranger are read."""
    forged = sample(0)
    with new_stream(tmp_path / "a.arrows", SPEC) as sink:
        sink.write(forged)
    assert facts([forged]) == facts(list(open_stream(tmp_path / "a.arrows")))


def test_a_pickled_reader_of_flight_carries_its_token() -> None:
    """Copies for loader workers hold the token: where such a pickle goes, the role goes."""
    client = flight._Client("grpc://127.0.0.1:1", flight.Access(token=SECRET))
    assert SECRET.encode() in pickle.dumps(client)


def test_a_link_in_an_archive_is_the_file_systems(tmp_path: Path) -> None:
    """Deleting from an archive follows no link out of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept", encoding="utf-8")
    save_archive([sample(0)], tmp_path / "archive", spec=SPEC)
    (tmp_path / "archive" / "runs" / "link").symlink_to(outside)
    LocalFolder(tmp_path / "archive").delete("runs/link")
    assert "kept" == (outside / "kept").read_text(encoding="utf-8")
    assert 1 == len(open_archive(tmp_path / "archive"))


def test_no_kind_is_lost_to_a_peer() -> None:
    """What a Flight server says of an error is text and a kind; a kind that is unknown is a connection error."""
    for said in (b"not json", b"[1]", b'["DataError", "no kind", "text"]', b'{"a": 1}', b"[[], {}, 5]"):
        error = flight._heard(fl.FlightServerError("x", extra_info=said), "grpc://h:1")
        assert ErrorKind.CONNECTION is error.kind
