"""What an archive promises on the local file system and in an object store alike: commits, damage, compaction."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import partial

import pytest

from routeplane.archive import compact, delete, new_run, recover, verify
from routeplane.errors import DataError, ErrorKind, FormatError, StoreError, UsageError
from tests.archive.archives import SPEC, every_flip, rich_records, sized
from tests.archive.places import Place
from tests.archive.writers import start
from tests.stream.streams import content, contents, record

PROCESSES = 3


def test_records_and_ranges_come_back(place: Place) -> None:
    """The same verbs for both, a key there once."""
    records = sized([300, 700, 20])
    place.save(records[:2], shard_bytes=1)
    commit = place.save(records[2:], shard_bytes=1)
    archive = place.open(expected_snapshot=commit.snapshot)

    assert contents(records) == contents(archive.values())
    wanted = archive.read(records[1].key, tokens=(500, 600), layer_ids=[4])
    assert content(records[1].slice(500, 600).select([4])) == content(wanted)
    with pytest.raises(DataError):
        place.save(records[:1])
    assert verify(place.where, options=place.options).problems == ()


def commits_of_processes(place: Place, each: int) -> None:
    """Three processes save runs at once; every acknowledged record is there, and nothing else."""
    place.save([])
    processes = [start("commit", place.where, 1_000 * index, each, options=place.options) for index in range(PROCESSES)]
    acknowledged = [int(line) for process in processes for line in process.communicate(timeout=500)[0].split()]
    archive = place.open()

    assert PROCESSES * each == len(acknowledged)
    assert {f"sample-{index}" for index in acknowledged} == {key.sample_id for key in archive}
    assert PROCESSES * each + 1 == archive.commit
    assert verify(place.where, options=place.options).problems == ()


def test_commits_at_once_lose_nothing(place: Place) -> None:
    """The small form of the next test."""
    commits_of_processes(place, 6)


@pytest.mark.slow
def test_120_commits_at_once_lose_nothing(place: Place) -> None:
    """Three processes, forty commits each, all of them there."""
    commits_of_processes(place, 40)


def test_a_writer_killed_between_files_leaves_the_last_commit(place: Place) -> None:
    """Killed with shards out and no commit: readers see what was committed, compaction removes the rest."""
    records = sized([300])
    place.save(records)
    with start("write", place.where, 100, 0, 600, "killed", options=place.options) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)

    assert place.names("runs/killed-")
    assert contents(records) == contents(place.open().values())
    assert [("writer", "alarm")] == [
        (str(item.kind), item.severity) for item in verify(place.where, options=place.options).problems
    ]
    assert () == compact(place.where, options=place.options).folders
    (folder,) = compact(place.where, grace_s=0, options=place.options).folders
    assert folder.startswith("killed-")
    assert [] == place.names("runs/killed-")
    assert contents(records) == contents(place.open().values())


def test_two_writers_of_one_record_commit_it_once(place: Place) -> None:
    """Neither saw the other's record when it wrote its own; the later one to commit does."""
    place.save(sized([5]))
    first, second = (new_run(place.where, SPEC, options=place.options) for _ in range(2))
    for sink in (first, second):
        sink.write(record(1, 6, spec=SPEC))
    first.close()
    with pytest.raises(DataError) as caught:
        second.close()

    assert ErrorKind.DUPLICATE_KEY == caught.value.kind
    assert ["sample-0", "sample-1"] == [key.sample_id for key in place.open()]
    assert () == verify(place.where, options=place.options).problems


# ----------------------------------------------------------------------------------------------------------------------
# Damage
# ----------------------------------------------------------------------------------------------------------------------


def test_a_flip_in_any_chunk_is_listed(place: Place) -> None:
    """Bits all over the shards: an error of the read, and a finding of `verify`; never other content."""
    place.save(sized([700, 30]))
    shards = place.names("/c/")
    assert 2 == len(shards)
    for name in shards:
        data = place.get(name)
        for position, mask in every_flip(len(data), step=max(1, len(data) // 12)):
            place.put(name, data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :])
            with pytest.raises(FormatError) as caught:
                contents(place.open().values())
            assert ErrorKind.CORRUPT_CHUNK == caught.value.kind
            assert not verify(place.where, options=place.options).intact
        place.put(name, data)
    assert verify(place.where, options=place.options).problems == ()


@pytest.mark.parametrize("lost", ["routes/c/", "token_ids/c/", "keys.u64", "00000.parquet", "manifest.json"])
def test_a_lost_file_is_an_error(place: Place, lost: str) -> None:
    """Never fill values, also where the archive was open before."""
    place.save(sized([700]))
    archive = place.open()
    (name,) = place.names(lost)
    place.lose(name)

    for found in (archive, place.open()):
        with pytest.raises(FormatError) as caught:
            found.read(("sample-0", 0, 0), tokens=(3, 9))
        assert ErrorKind.LOST_FILE == caught.value.kind
    assert ErrorKind.LOST_FILE in {item.kind for item in verify(place.where, options=place.options).problems}


def test_a_lost_commit_is_an_error(place: Place) -> None:
    """The one before it is not taken for the newest."""
    place.save(sized([5]))
    place.save(sized([6], first=1))
    place.lose("commits/0000000002.json")
    with pytest.raises(FormatError) as caught:
        place.open()
    assert ErrorKind.ROLLED_BACK == caught.value.kind
    assert ErrorKind.ROLLED_BACK in {item.kind for item in verify(place.where, options=place.options).problems}


def test_recover_goes_to_any_place(place: Place, tmp_path: object) -> None:
    """Intact records are copied from either kind of place."""
    place.save(sized([5, 6]))
    found = recover(place.where, f"{tmp_path}/copy", options=place.options)
    assert (2, 0, 0) == (found.intact, found.partial, found.lost)


# ----------------------------------------------------------------------------------------------------------------------
# Deletion and compaction
# ----------------------------------------------------------------------------------------------------------------------


def test_deleted_records_are_gone_at_once_and_their_bytes_after_compaction(place: Place) -> None:
    """By key and by run; what stays reads as before; the rewritten run has the digest that the commit promised."""
    records = sized([300, 700, 20, 40])
    place.save(records[:3], run="first", attributes={"policy": "1"})
    place.save(records[3:], run="second")
    delete(place.where, keys=[records[1].key], options=place.options)
    commit = delete(place.where, runs=["second"], options=place.options)
    archive = place.open(expected_snapshot=commit.snapshot)

    assert contents([records[0], records[2]]) == contents(archive.values())
    assert contents([records[0], records[2]]) == contents(archive.select())
    assert (2, 320) == (len(archive), archive.num_tokens)
    assert records[1].key not in archive
    assert 2 == archive.table().num_rows
    assert verify(place.where, options=place.options).records == 2
    before = archive.digest
    done = compact(place.where, options=place.options)

    assert (("first",), 1, 2) == (done.rewritten, done.records, len(done.folders))
    archive = place.open(expected_snapshot=done.snapshot)
    assert contents([records[0], records[2]]) == contents(archive.values())
    assert ({"policy": "1"}, before) == (archive.attributes("first"), archive.digest)
    assert verify(place.where, options=place.options).problems == ()
    assert [] == place.names("second-")
    assert 1 == len({name.split("/")[1] for name in place.names("runs/first-")})
    place.save(records[1:2])  # what was deleted may be saved again
    assert records[1].key in place.open()


def test_a_reader_during_compaction_meets_an_error_or_its_own_rows(place: Place) -> None:
    """A reader of an earlier commit reads right rows, or learns that the files are gone; it opens the archive again."""
    records = sized([600] * 6)
    place.save(records, shard_bytes=1)
    expected = {item.key: content(item) for item in records}
    stop, wrong, reads = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                for key, item in place.open().items():
                    reads.append(key)
                    if content(item) != expected[key]:
                        wrong.append(key)
            except FormatError as error:
                if error.kind != ErrorKind.LOST_FILE:
                    wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for item in records[:4]:
            delete(place.where, keys=[item.key], options=place.options)
            compact(place.where, options=place.options)
    finally:
        stop.set()
        reader.join()

    assert reads
    assert [] == wrong
    assert contents(records[4:]) == contents(place.open().values())


def test_a_record_that_another_one_continues_is_kept(place: Place) -> None:
    """Deleting the base of a shared prefix would leave rows that stand nowhere; with what continues it, it goes."""
    plain, scored, tail = rich_records()
    place.save([plain, scored, tail])
    with pytest.raises(DataError) as caught:
        delete(place.where, keys=[plain.key], options=place.options)
    assert ErrorKind.PREFIX == caught.value.kind
    assert 3 == len(place.open())
    delete(place.where, keys=[plain.key, tail.key], options=place.options)
    assert [scored.key] == list(place.open())


def test_what_is_not_there_cannot_be_deleted(place: Place) -> None:
    """Neither records nor runs, and then nothing else of the call is."""
    place.save(sized([5]), run="first")
    for wanted in ({"keys": [("sample-0", 0, 0), ("sample-9", 0, 0)]}, {"runs": ["second"]}):
        with pytest.raises(KeyError):
            delete(place.where, **wanted, options=place.options)
    assert 1 == len(place.open())
    delete(place.where, keys=[("sample-0", 0, 0)], options=place.options)
    assert (0, ()) == (len(place.open()), place.open().runs)


# ----------------------------------------------------------------------------------------------------------------------
# Object stores alone
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["object store"], indirect=True)
def test_a_store_that_does_not_answer_is_a_typed_error(place: Place) -> None:
    """Nothing listens there, after the retries that obstore makes."""
    options = {**(place.options or {}), "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
    with pytest.raises(StoreError) as caught:
        Place(where=place.where, options=options).open()
    assert ErrorKind.STORAGE == caught.value.kind


@pytest.mark.parametrize("place", ["object store"], indirect=True)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_refused(place: Place) -> None:
    """obstore's threads are not there after a fork: an error says so, where a read would wait forever."""
    place.save(sized([5]))
    archive = place.open()
    assert 1 == len(list(archive.values()))
    child = multiprocessing.get_context("fork").Process(target=partial(_read_in_child, archive))
    child.start()
    child.join(60)
    assert 0 == child.exitcode


def _read_in_child(archive: object) -> None:
    signal.alarm(30)
    try:
        list(archive.values())  # type: ignore[attr-defined]
    except UsageError:
        os._exit(0)
    os._exit(1)
