"""The names of vLLM that the writer inside the engine rests on, none of them public: one table, checked in two ways.

``RouteScheduler`` compares it with the vLLM that runs, at start; a test compares it with the sources of released
wheels. A release that renames one of them is refused at start, and never records other rows. Knows no vLLM: what is
compared is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

__all__ = ["FIELDS", "FUNCTIONS", "find_drift"]

#: Module and qualified name -> the parameters that are used, beyond which others may stand.
FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output": ("request", "new_token_ids"),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("request_ids", "finished_status"),
        "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state": ("pause_state",),
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": (),
        "vllm.v1.core.sched.scheduler:Scheduler.has_requests": (),
        "vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask": ("scheduler_output",),
        "vllm.v1.core.sched.scheduler:Scheduler.shutdown": (),
        "vllm.v1.executor.abstract:Executor.execute_model": ("scheduler_output", "non_block"),
        "vllm.v1.executor.abstract:Executor.sample_tokens": ("grammar_output",),
        "vllm.v1.engine.core:EngineCore.collective_rpc": ("method", "timeout", "args", "kwargs"),
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request": ("tokenizer", "request"),
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer.update": ("new_token_ids", "stop_terminated"),
        "vllm.v1.request:Request.__init__": (
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
            "resumable",
        ),
        "vllm.v1.request:RequestStatus.get_finished_reason": ("status",),
    }
)
#: Module and class -> attributes that are read.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.engine:EngineCoreOutput": (
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "finish_reason",
            "kv_transfer_params",
            "prefill_stats",
            "routed_experts",
        ),
        "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
        "vllm.sampling_params:SamplingParams": ("routed_experts_prompt_start", "extra_args", "stop"),
        "vllm.v1.core.sched.interface:PauseState": ("UNPAUSED", "PAUSED_ALL"),
        "vllm.v1.request:RequestStatus": ("FINISHED_LENGTH_CAPPED",),
        "vllm.v1.request:Request": (
            "mm_features",
            "num_computed_tokens",
            "num_output_placeholders",
            "num_output_tokens",
            "prompt_embeds",
            "prompt_token_ids",
            "resumable",
            "sampling_params",
        ),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("__init__",),
    }
)


def find_drift(
    parameters_of: Callable[[str], Sequence[str] | None], fields_of: Callable[[str], Sequence[str] | None]
) -> list[str]:
    """Compare the table with one vLLM.

    Args:
        parameters_of: Names the parameters of a function of FUNCTIONS; None where there is none.
        fields_of: Names the attributes of a class of FIELDS; None where there is none.

    Returns:
        What differs, one line each.

    >>> find_drift(lambda name: None, lambda name: ("outputs",))[0]
    'vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output is gone'
    """
    found = []
    for table, lookup in ((FUNCTIONS, parameters_of), (FIELDS, fields_of)):
        for name, expected in table.items():
            there = lookup(name)
            if there is None:
                found.append(f"{name} is gone")
            elif absent := [item for item in expected if item not in there]:
                found.append(f"{name} has no {', '.join(absent)}")
    return found
