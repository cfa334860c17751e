from __future__ import annotations

import pytest

from logitscope.engines.fake import FakeEngine, fake_rows
from logitscope.testing import EngineCase, EngineSuite, tiny_tokenizer
from logitscope.testing.asserts import rounded


def fake_case(dtype: str = "float32", *, bos: bool = False, fault: str | None = None) -> EngineCase:
    tokenizer = tiny_tokenizer(bos=bos)

    def opened(block_rows: int | None) -> FakeEngine:
        return FakeEngine.open(
            tokenizer=tokenizer,
            dtype=dtype,
            context_length=160,
            eos_token_id=2,
            block_rows=block_rows or 8,
            fault=fault,
        )

    return EngineCase(
        opened(None),
        oracle=lambda ids: rounded(fake_rows(ids, 1001), dtype),
        name=f"fake {dtype}" + (" with BOS" if bos else ""),
        eos_token_id=2,
        reopen=opened,
    )


class TestFakeEngine(EngineSuite):
    @pytest.fixture(scope="class", params=["float32", "bfloat16"])
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> EngineCase:
        return fake_case(request.param)
