"""Each sentence of ``docs/how-to/start-a-fleet.md`` is held by a test that is named here, and what it prints is so."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest

from tests.meta.test_docs_blocks import read_blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "start-a-fleet.md"
#: Characters of the page when this table was begun; it was to be half as long.
LENGTH_BEFORE = 10_439

_DEMO = "tests/cli/test_demo_fleet.py::test_the_fleet_rolls_out_replays_and_leaves_no_process"
_ACTORS, _ENGINE, _GYM = "tests/fleet/test_actors.py", "tests/fleet/test_engine_actor.py", "tests/fleet/test_gym.py"
_ENDPOINTS, _STARTUP = "tests/fleet/test_endpoints.py", "tests/fleet/test_startup.py"
_TEARDOWN = "tests/fleet/test_teardown.py"
_LIFE = f"{_ENGINE}::test_an_engine_is_reserved_loaded_probed_served_killed_and_back_at_its_url"
_HOOK = f"{_ENGINE}::test_a_hook_runs_in_each_worker_and_a_dead_core_answers_503"

#: How a sentence or a row of the page's table begins -> the tests that fail where it is not so.
HELD: dict[str, tuple[str, ...]] = {
    "Engine, environment and trainer come up": (_DEMO,),
    "Needs the extra `fleet`": ("tests/fleet/test_page.py::test_the_extra_is_there",),
    "`routeplane demo --fleet` does it": (_DEMO,),
    "A task is a coroutine function with a name.": (
        f"{_STARTUP}::test_any_plan_comes_up_with_needs_and_resources_kept",
    ),
    "`needs` are tasks whose results": (f"{_STARTUP}::test_a_task_gets_the_results_of_what_it_needs_and_no_others",),
    "Tasks that share one of `resources`": (f"{_STARTUP}::test_tasks_that_share_a_resource_run_in_the_plans_order",),
    "A reserved endpoint answers 503": (
        f"{_ENDPOINTS}::test_a_caller_before_readiness_is_told_to_come_back",
        f"{_ENDPOINTS}::test_uvicorn_serves_on_the_very_socket_without_a_gap",
    ),
    "`context.acquire(make, close)` registers": (f"{_TEARDOWN}::test_random_plans_leave_nothing_behind",),
    "Where `make` is a function": (
        f"{_TEARDOWN}::test_a_thing_that_appears_after_its_task_was_cancelled_is_closed",
        f"{_ACTORS}::test_an_actor_is_gone_when_a_failed_start_returns",
    ),
    "`close` may be a coroutine function.": (
        f"{_TEARDOWN}::test_a_coroutine_function_is_awaited_in_the_loop_that_made_the_thing",
        f"{_TEARDOWN}::test_a_coroutine_function_is_awaited_after_its_loop_ended",
    ),
    "Each closer has `timeout=` seconds": (
        f"{_TEARDOWN}::test_a_closer_that_never_ends_is_told_and_stops_no_other",
        f"{_STARTUP}::test_a_clean_exit_reports_the_closers_that_failed",
    ),
    "Inside an event loop": (f"{_TEARDOWN}::test_a_coroutine_function_is_awaited_in_the_loop_that_made_the_thing",),
    "`Plan(tasks=..., setup=setup)` refuses": (
        "tests/fleet/test_setup.py::test_a_plan_checks_its_setup_before_any_task_runs",
        "tests/fleet/test_setup.py::test_each_inconsistent_cell_is_refused_with_the_key_to_change",
    ),
    "An actor that is not placed": (f"{_ACTORS}::test_an_actor_that_cannot_be_placed_ends_in_its_time",),
    "The URL has the address of the engine's node": (
        "tests/fleet/test_nodes.py::test_each_shard_advertises_its_own_node",
    ),
    "`load` refuses a dense model": (
        f"{_ENGINE}::test_what_cannot_return_routes_is_refused_before_weights_load",
        _LIFE,
    ),
    "`hook=": (_HOOK,),
    "`await handle.restart()` brings up": (
        _LIFE,
        f"{_ENDPOINTS}::test_no_caller_is_refused_while_servers_are_killed_ended_and_replaced",
    ),
    "`await handle.state()` says": (_LIFE, _HOOK),
    "A factory declares the keys": (
        f"{_ACTORS}::test_a_key_that_the_environment_does_not_consume_is_refused",
        f"{_ACTORS}::test_a_tokenizer_that_the_environment_does_not_take_is_refused",
    ),
    "Routes are required where": ("tests/fleet/test_environment.py::test_routes_are_required_where_they_are_captured",),
    "`VIRTUAL_ENV` and": (
        f"{_ACTORS}::test_children_get_the_root_of_the_virtual_environment_and_no_copy_of_ours",
        f"{_ACTORS}::test_what_is_not_the_root_of_an_environment_is_refused",
    ),
    "`routeplane.fleet.gym_environment:make_environment` runs": (
        f"{_GYM}::test_a_rollout_of_gyms_own_servers_is_the_engines_record",
        f"{_GYM}::test_rows_that_are_all_missing_are_not_routes",
        f"{_GYM}::test_a_call_without_the_field_is_named",
    ),
    "One failure cancels the other tasks": (
        f"{_STARTUP}::test_one_failure_cancels_the_rest_and_takes_down_what_is_up",
    ),
    "SIGINT does the same": (
        f"{_STARTUP}::test_an_interrupt_takes_down_what_is_up",
        f"{_TEARDOWN}::test_interrupts_in_teardown_skip_no_closer",
    ),
    "a task fails": (f"{_STARTUP}::test_every_failure_is_listed_with_its_cause",),
    "no free port in the range": (
        f"{_ENDPOINTS}::test_a_full_range_is_refused_with_the_range_and_the_cause",
        f"{_ENDPOINTS}::test_a_named_port_that_another_holds_is_refused",
    ),
    "an actor died": (f"{_ACTORS}::test_errors_cross_as_what_they_are",),
    "a task, an actor or a server does not answer": (
        f"{_ACTORS}::test_an_actor_that_cannot_be_placed_ends_in_its_time",
        f"{_GYM}::test_servers_that_never_answer_end_in_their_time",
    ),
    "the environment's own code fails": (
        "tests/fleet/test_environment.py::test_faults_of_infrastructure_and_of_data_are_told_apart_and_pickle",
    ),
    "closing fails as well": (
        f"{_STARTUP}::test_a_closer_that_fails_hides_nothing_and_stops_no_other",
        f"{_STARTUP}::test_a_clean_exit_reports_the_closers_that_failed",
    ),
}


def sentences(page: str) -> list[str]:
    """What the page says outside of its code: sentences, items of lists, rows of tables."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    found: list[str] = []
    for block in re.split(r"\n\s*\n", prose):
        if block.strip().startswith(("#", "!")):
            continue
        if block.strip().startswith("|"):
            found += [row.strip("| ") for row in block.strip().splitlines()[2:]]
            continue
        for item in re.split(r"^\* ", block, flags=re.MULTILINE):
            text = " ".join(item.split())
            found += [each for each in re.split(r"(?<=\.)\s+(?=[A-Z`])", text) if each]
    return found


@pytest.mark.parametrize("sentence", sentences(PAGE.read_text(encoding="utf-8")))
def test_a_sentence_is_held_by_tests_that_exist(sentence: str) -> None:
    """One entry of the table begins it, and the tests of that entry are there."""
    [tests] = [tests for begin, tests in HELD.items() if sentence.startswith(begin)]
    for each in tests:
        path, _, name = each.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, each


def test_no_entry_is_of_a_sentence_that_is_gone() -> None:
    """Each entry begins one sentence of the page."""
    page = sentences(PAGE.read_text(encoding="utf-8"))
    assert [] == [begin for begin in HELD if len([each for each in page if each.startswith(begin)]) != 1]


def test_the_page_is_half_as_long_as_it_was() -> None:
    """In characters."""
    assert len(PAGE.read_bytes()) <= LENGTH_BEFORE / 2


def test_the_blocks_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text blocks are the output of the Python blocks, in order."""
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    namespace: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(output):
        for block in read_blocks(page):
            assert block.reason is None
            exec(compile(block.text, str(PAGE), "exec", dont_inherit=True), namespace)
    assert "".join(re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)) == output.getvalue()


def test_the_extra_is_there() -> None:
    """What the library's fleet imports beside the engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"routeplane[ray]", "uvicorn"} == {
        re.split(r"[<>=~ ]", each)[0] for each in project["optional-dependencies"]["fleet"]
    }
