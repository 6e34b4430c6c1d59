"""The engine's contract over real vLLM: its OpenAI server, and the engine of this process.

float32, hence no flip is expected. Against Transformers, the order of the layers shows too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from vllm import SamplingParams

from routeplane.capture.http.openai import EngineAnswer, EngineChoice, EngineRequest, HttpEngine
from routeplane.errors import refused
from routeplane.testing.contracts import EngineContract
from routeplane.testing.contracts.engine_contract import CheckOptions
from tests.capture.vllm_engine import SPEC, VOCABULARY, Engine, reference_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.vllm

OPTIONS = CheckOptions(vocabulary=VOCABULARY, requests=4)


class ServerContract(EngineContract):
    """vLLM's own server, as a user starts it."""

    spec = SPEC
    options = OPTIONS
    model: ClassVar[Any]

    @pytest.fixture(autouse=True)
    def started(self, server: tuple[str, Any]) -> None:
        """Point the suite at the server of the module."""
        url, model = server
        type(self).engine = HttpEngine(url, SPEC)
        type(self).model = model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A server, and its weights in Transformers."""
    from tests.capture.tiny_server import running_server, write_model  # what the tests of an engine do without

    folder = tmp_path_factory.mktemp("contract")
    (folder / "model").mkdir()
    model = write_model(folder / "model")
    with running_server(folder / "model", log=folder / "log") as running:
        yield running.url, model


class TestServer(ServerContract):
    """Compared with itself."""

    def test_what_it_does_not_offer(self) -> None:
        """Streams without routes, and no way to load weights: the two known limits, and no other check is left out."""
        checks = self.result().checks

        assert {"stream", "update"} == {name for name, became in checks.items() if not became.startswith("held")}
        assert "routes in a stream" in checks["stream"]
        assert 0 == self.result().flipped


class TestServerAgainstTransformers(ServerContract):
    """Compared with a forward of the same weights."""

    def reference(self, token_ids: Sequence[int]) -> NDArray[Any]:
        """Transformers' choice."""
        return np.asarray(reference_rows(self.model, token_ids))


class TestEngineOfThisProcess(EngineContract):
    """``LLM``, without HTTP: whole answers, one request at a time."""

    spec = SPEC
    options = OPTIONS
    llm: ClassVar[Engine]
    one_at_a_time = threading.Lock()

    @pytest.fixture(autouse=True)
    def started(self, engine: Engine) -> None:
        """Point the suite at the engine of the session."""
        type(self).llm = engine

    def reference(self, token_ids: Sequence[int]) -> NDArray[Any]:
        """Transformers' choice."""
        return np.asarray(reference_rows(self.llm.model, token_ids))

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """One request; what ``LLM`` has no answer for is refused."""
        if request.stream or request.stop or request.keep_prompt:
            raise refused("a whole answer in tokens", "another request")
        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            n=request.choices,
            seed=request.seed,
            stop_token_ids=list(request.stop_ids),
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            routed_experts_prompt_start=request.first_row,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        prompt |= {} if request.salt is None else {"cache_salt": request.salt}
        with self.one_at_a_time:  # an LLM is not for several threads
            [output] = self.llm.llm.generate([prompt], sampling, use_tqdm=False)
        choices = tuple(
            EngineChoice(
                generation_ids=tuple(choice.token_ids),
                routes=choice.routed_experts,
                finish_reason=choice.finish_reason,
            )
            for choice in output.outputs
        )
        return EngineAnswer(prompt_ids=request.prompt_ids, choices=choices, cached=output.num_cached_tokens)

    def test_what_it_does_not_offer(self) -> None:
        """In float32 no row flips; streams, aborts and updates need another client."""
        checks = self.result().checks

        assert {"stream", "abort", "update"} == {
            name for name, became in checks.items() if not became.startswith("held")
        }
        assert 0 == self.result().flipped
