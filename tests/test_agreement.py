"""`Agreement`: an error of one rank is raised on all, and nobody waits for a rank that gave up."""

import ast
import atexit
import os
import pickle
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from test_dcp import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from gdsdata.collective import agreement as module
from gdsdata.collective.agreement import Agreement, Kind, group_of
from gdsdata.collective.shared_errors import first_error, packed, ranks_in_words, unpacked, words_of_values
from gdsdata.errors import CorruptData, IoError, RankLost


def _no_part(session, headers):
    raise AssertionError("nobody wants anything")


def _agreement(timeout_s=20):
    return Agreement(group_of("auto"), timeout_s)


def _error_of(body, call=None, timeout_s=20, take_part=_no_part):
    """Return the class, text and notes of the error of a session, and how long it took."""
    began = time.monotonic()
    try:
        with _agreement(timeout_s).session(call or {"call": "test"}, take_part) as session:
            body(session)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", []), time.monotonic() - began
    return None


class _NotPicklable(ValueError):
    def __reduce__(self):
        raise TypeError("not this one")


def _raise(error):
    raise error


def _errors(rank, folder):
    found = {}

    def on_rank_1(error):
        return lambda session: _raise(error) if rank == 1 else None

    corrupt = CorruptData("a record is damaged", "a.pt", 7, 9)
    try:
        with _agreement().session({"call": "test"}, _no_part):
            if rank == 1:
                raise corrupt
    except CorruptData as error:
        found["attributes"] = error.path, error.offset, error.length, str(error)
        found["is mine"] = error is corrupt
        found["notes"] = error.__notes__
    found["unpicklable"] = _error_of(on_rank_1(_NotPicklable("odd")))
    found["system"] = _error_of(on_rank_1(FileNotFoundError(2, "no file", "x.pt")))
    found["at another place"] = _error_of(lambda s: _raise(IoError(5, "bad")) if rank == 1 else s.agree(Kind.STEP))
    found["on all"] = _error_of(lambda s: _raise(ValueError("everywhere")))
    found["two"] = _error_of(lambda s: _raise(ValueError(f"of {rank}")) if rank < 2 else None)
    found["fine"] = _error_of(lambda s: found.update(gathered=s.gather({"rank": rank})))
    return found


def test_an_error_of_one_rank_is_raised_on_all_and_the_group_works_afterwards(tmp_path):
    ranks = on_ranks(3, _errors, tmp_path)
    assert [one["attributes"] for one in ranks] == [("a.pt", 7, 9, "a record is damaged")] * 3
    assert [one["is mine"] for one in ranks] == [False, True, False]
    for one in ranks:
        assert one["notes"] == ["on rank 1 of 3 that read together"]
        assert one["unpicklable"][0] == ("RuntimeError" if one is not ranks[1] else "_NotPicklable")
        assert "odd" in one["unpicklable"][1]
        assert one["system"][:2] == ("FileNotFoundError", "[Errno 2] no file: 'x.pt'")
        assert one["at another place"][:2] == ("IoError", "bad")
        assert one["on all"][:3] == ("ValueError", "everywhere", [])
        assert one["two"][:3] == ("ValueError", "of 0", ["on rank 0 of 3 that read together; rank 1 failed otherwise"])
        assert one["fine"] is None
        assert one["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def _mismatches(rank, folder):
    def step(session):
        if rank:
            session.agree(Kind.STEP)

    return (
        _error_of(lambda s: None, {"call": "load", "verify": rank == 2}),
        _error_of(lambda s: None, {"call": "load" if rank else "restore"}),
        _error_of(step),
        _error_of(lambda s: None),
    )


def test_ranks_that_make_different_calls_all_raise_what_differs(tmp_path):
    for arguments, call, place, afterwards in on_ranks(3, _mismatches, tmp_path):
        assert arguments[:2] == (
            "ValueError",
            "the ranks of the group make different calls: verify=False on ranks 0, 1, True on rank 2",
        )
        assert "call='restore' on rank 0, 'load' on ranks 1, 2" in call[1]
        assert place[0] == "ValueError" and "agreement='done' on rank 0, 'step' on ranks 1, 2" in place[1]
        assert afterwards is None


def _busy(rank, folder):
    taken = []

    def body(session):
        if rank == 0:
            began = time.monotonic()
            session.wait(lambda seconds: time.sleep(0.2) or time.monotonic() - began > 1.2)
        if rank == 1:
            for _ in range(2):
                session.agree(Kind.WANTS, 5)

    module._BEAT_S = 0.2
    error = _error_of(body, timeout_s=1, take_part=lambda session, headers: taken.append(headers[:, 1].tolist()))
    return error, taken


def test_a_busy_rank_keeps_the_others_and_those_that_are_done_take_part(tmp_path):
    assert on_ranks(2, _busy, tmp_path) == [(None, [[0, 5], [0, 5]]), (None, [])]


def _fail_while_busy(rank, folder):
    module._BEAT_S = 0.1
    return _error_of(lambda s: s.wait(lambda seconds: time.sleep(seconds)) if rank else _raise(ValueError("early")))


def test_a_busy_rank_learns_of_an_error_at_its_next_beat(tmp_path):
    for error in on_ranks(2, _fail_while_busy, tmp_path):
        assert error[:2] == ("ValueError", "early") and error[3] < 5


def _be_silent_on_rank_2(rank, folder):
    def body(session):
        if rank == 2:
            time.sleep(4)
        session.agree(Kind.STEP)

    assert _error_of(lambda session: session.agree(Kind.STEP), timeout_s=60) is None  # of another call
    return _error_of(body, timeout_s=2)


def test_a_silent_rank_is_an_error_on_all_within_the_timeout(tmp_path):
    for error in on_ranks(3, _be_silent_on_rank_2, tmp_path):
        assert error[0] == "RankLost" and "silent for 2 s" in error[1]
        assert error[3] < 8


def _die_on_rank_2(rank, folder):
    def body(session):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        session.agree(Kind.STEP)

    (folder / f"error-{rank}").write_text(repr(_error_of(body)))
    while len(list(folder.glob("error-*"))) < 2:
        time.sleep(0.01)
    os._exit(0)  # torch's own end of the group would wait for the dead rank


def test_a_killed_rank_is_an_error_on_the_others_at_once(tmp_path):
    with pytest.raises(BaseException):  # no rank answers  # noqa: B017
        on_ranks(3, _die_on_rank_2, tmp_path)
    for rank in (0, 1):
        kind, text, _, seconds = ast.literal_eval((tmp_path / f"error-{rank}").read_text())
        assert kind == "RankLost" and "a rank of the 3 that read together has ended" in text
        assert seconds < 10


def _receive_from_nobody(session):
    _ = session.receive(torch.zeros(100), 0)
    raise ValueError("in a transfer")


def _fail_in_a_transfer(rank, folder):
    def body(session):
        session.agree(Kind.STEP)
        with session.transfers():
            if rank == 1:
                _receive_from_nobody(session)
            session.complete(session.receive(torch.zeros(100), 1))

    return _error_of(body)


def test_an_error_in_a_transfer_leaves_nobody_waiting(tmp_path):
    first, second, third = on_ranks(3, _fail_in_a_transfer, tmp_path)
    assert second[:2] == ("ValueError", "in a transfer")
    for error in (first, third):
        assert error[0] == "RankLost" and error[3] < 10


def _groups(rank, folder):
    assert group_of(None) is None
    assert group_of("auto") is dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="mesh of 2 dimensions"):
        group_of(mesh)
    with pytest.raises(ValueError, match="give a process group"):
        group_of("dp")
    own = dist.new_group([rank], use_local_synchronization=True)
    assert group_of(own) is None
    others = dist.new_group([0, 3])
    if rank in (1, 2):
        with pytest.raises(ValueError, match="no rank of the group"):
            group_of(others)
    ended = dist.new_group()
    dist.destroy_process_group(ended)
    with pytest.raises(ValueError, match="replicas=: the process group was destroyed"):
        group_of(ended, "replicas")
    agreement = Agreement(group_of(mesh["dp"]), 20)
    with agreement.session({"call": "test"}, _no_part) as session:
        members = session.gather(rank)
        nodes = session.nodes().tolist()
        values = torch.arange(3) if session.rank else torch.zeros(3, dtype=torch.int64)
        session.broadcast(values, 1)
        assert values.tolist() == [0, 1, 2]
    return members, nodes, agreement.ranks


def test_groups_are_process_groups_and_dimensions_of_meshes(tmp_path):
    ranks = on_ranks(4, _groups, tmp_path)
    assert ranks == [([0, 2], [0, 0], [0, 2]), ([1, 3], [0, 0], [1, 3])] * 2


def test_without_a_group_there_is_nobody_to_agree_with():
    assert group_of("auto") is None and group_of(None) is None
    with pytest.raises(ValueError, match="give a process group"):
        group_of(3)


def test_errors_of_ranks_in_words():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 1, 5, 6, 7]) == "ranks 0, 1, 5-7"
    assert words_of_values([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]) == (
        "b=2 on rank 0, 3 on rank 1, nothing on rank 2"
    )
    errors = [None, ValueError("a"), ValueError("a"), ValueError("b")]
    words = "on ranks 5, 6 of ranks 4-7; rank 7 failed otherwise"
    assert first_error(errors, [4, 5, 6, 7], "ranks 4-7") == (1, words)
    assert first_error(errors[1:3], [0, 1], "both") == (0, "")


def test_errors_that_cannot_be_pickled_keep_their_text():
    assert unpacked(b"") is None and packed(None) == b""
    found = unpacked(packed(_NotPicklable("odd")))
    assert type(found) is RuntimeError and str(found) == "_NotPicklable: odd"
    lost = unpacked(packed(RankLost("gone")))
    assert type(lost) is RankLost
    assert type(unpacked(pickle.dumps(3))) is RuntimeError


def _group_at_the_end(rank, folder):
    with _agreement().session({"call": "test"}, _no_part):
        group = weakref.ref(_agreement().twin().group)
    atexit._run_exitfuncs()
    return group() is None


def test_the_end_of_a_program_waits_for_the_threads_of_its_gloo_group(tmp_path):
    """They free tensors, for which torch acquires the GIL. Later, that would abort the program."""
    assert on_ranks(2, _group_at_the_end, tmp_path) == [True, True]
