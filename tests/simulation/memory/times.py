"""The memory service's times in simulations, so that all of them pass while there are faults."""

from __future__ import annotations

ASSERT_S = 3.0
PLAN_S = 3.0
PASSED_S = 1.0
AGING_S = 0.5
TICK_S = 0.5
SHORTER = {
    "forged.memory.book.device_table.ASSERT_S": ASSERT_S,
    "forged.memory.book.compactions.PLAN_S": PLAN_S,
    "forged.memory.book.compactions.PLAN_AGAIN_S": 0.5,
    "forged.memory.waiting.PASSED_S": PASSED_S,
    "forged.memory.waiting.AGING_S": AGING_S,
    "forged.memory.forecast.SAMPLE_S": 0.5,
    "forged.memory.service.FACTS_BURST": 2.0,
}
