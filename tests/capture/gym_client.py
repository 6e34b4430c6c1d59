"""A conversation through NeMo Gym's own model server, run by the Python of its environment.

Engine, middleware, Gym, agent. Usage: ``python gym_client.py URL`` with the ``/v1`` address of a vLLM server. Three
turns of tool calls as an agent makes them: each request has all output items so far. Prints the three responses, as Gym
validated them, as one JSON list.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

WORDS = list(range(20, 512))
TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
    "strict": False,
}


def model_server(url: str) -> Any:
    """The application of Gym's vLLM model server, which asks for routes as lists on the message."""
    os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps({"head_server": {"host": "127.0.0.1", "port": 1}})
    from nemo_gym.server_utils import ServerClient, get_global_config_dict
    from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

    config = VLLMModelConfig(
        host="127.0.0.1",
        port=1,
        entrypoint="",
        name="policy",
        base_url=url,
        api_key="none",
        model="tiny",
        return_token_id_information=True,
        uses_reasoning_parser=False,
        extra_body={"allowed_token_ids": WORDS, "ignore_eos": True, "seed": 7},
        default_headers={"x-routeplane-form": "nemo-lists"},
    )
    client = ServerClient(
        head_server_config=ServerClient.load_head_server_config(), global_config_dict=get_global_config_dict()
    )
    return VLLMModel(config=config, server_client=client).setup_webserver()


def converse(app: Any) -> list[Any]:
    """Three turns; the tool answers with two words."""
    from fastapi.testclient import TestClient

    history: list[Any] = [{"role": "user", "content": "w100 w101 w102"}]
    responses = []
    with TestClient(app) as client:
        for turn in range(3):
            body = {"input": history, "tools": [TOOL], "max_output_tokens": 7, "temperature": 1.0}
            reply = client.post("/v1/responses", json=body)
            reply.raise_for_status()
            responses.append(reply.json())
            history += responses[-1]["output"]
            call_id = responses[-1]["output"][-1]["call_id"]
            history.append({"type": "function_call_output", "call_id": call_id, "output": f"w{200 + turn} w210"})
    return responses


if __name__ == "__main__":
    sys.stdout.write(json.dumps(converse(model_server(sys.argv[1]))))
