"""Mutants of the rows of tensorforge_greenfield_tasks.md, Task 2, and of its general guidelines."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Constant, Edit, Mutation

CORE = "forged/memory/pool/core.py"
ERRORS = "forged/memory/errors.py"
FUNCTIONS = "forged/memory/functions.py"
LISTS = "forged/memory/pool/free_lists.py"
MODEL = "forged/memory/model.py"
POOL = "forged/memory/pool/memory_pool.py"
CRITERIA = "Memory: acceptance criteria"


def thawed(record: str) -> Edit:
    return Edit(MODEL, f"class {record}(msgspec.Struct, frozen=True", f"class {record}(msgspec.Struct")


def constants(record: str, values: Mapping[str, str]) -> dict[str, Mutation | str]:
    return {f"{record}.{name}": Constant(MODEL, f"{record}.{name}", value) for name, value in values.items()}


MUTANTS: Mapping[str, Mutation | str] = {
    "enum BlockStatus": Edit(MODEL, 'CACHED = "cached"', 'CACHED = "cache"'),
    "BlockStatus.Free": Edit(
        CORE, "        if total:\n            self.holes.add(", "        if total < 0:\n            self.holes.add("
    ),
    "BlockStatus.Allocated": Edit(CORE, "None, ALLOCATED, None, made_id", "None, PINNED, None, made_id"),
    "BlockStatus.Pinned": Edit(CORE, "        if request.pinned:\n", "        if False:\n"),
    "BlockStatus.Cached": Edit(
        FUNCTIONS, "if block.status is BlockStatus.CACHED]", "if block.status != BlockStatus.FREE]"
    ),
    "struct MemoryBlock": thawed("MemoryBlock"),
    **constants(
        "MemoryBlock",
        {
            "block_id": '""',
            "offset": "0",
            "size": "0",
            "status": "BlockStatus.FREE",
            "tensor_id": "None",
            "allocated_at": "0.0",
            "last_accessed": "0.0",
        },
    ),
    "struct GpuDevice": thawed("GpuDevice"),
    **constants(
        "GpuDevice",
        {"device_id": '""', "total_memory": "0", "memory_clock_mhz": "0", "compute_capability": "(0, 0)"},
    ),
    "struct AllocationRequest": thawed("AllocationRequest"),
    **constants(
        "AllocationRequest",
        {"tensor_id": '""', "size": "0", "alignment": "256", "pinned": "False", "priority": "0"},
    ),
    "struct AllocationResult": thawed("AllocationResult"),
    **constants("AllocationResult", {"success": "False", "block_id": "None", "offset": "None", "actual_size": "None"}),
    "AllocationResult.error": Edit(POOL, 'error=f"{missing.reason} ({missing.fix})"', 'error=f"{missing.reason}"'),
    "struct PoolStats": thawed("PoolStats"),
    **constants(
        "PoolStats",
        {
            "total_bytes": "0",
            "allocated_bytes": "0",
            "free_bytes": "0",
            "pinned_bytes": "0",
            "cached_bytes": "0",
            "fragmentation_ratio": "0.0",
            "largest_free_block": "0",
            "block_count": "0",
            "allocation_count": "0",
        },
    ),
    "fn align_up(size, alignment)": Edit(
        FUNCTIONS, '(checked_size("size", size) + alignment - 1) &', '(checked_size("size", size) + alignment) &'
    ),
    "fn is_power_of_two(n)": Edit(FUNCTIONS, "return n > 0 and n & (n - 1) == 0", "return n & (n - 1) == 0"),
    "fn fragmentation_ratio(blocks)": Edit(FUNCTIONS, "max(free, default=0))", "min(free, default=0))"),
    "fn best_fit_block(blocks, size, alignment)": Edit(
        FUNCTIONS, "fits(block.offset, block.size, needed, alignment)", "block.size >= needed"
    ),
    "fn eviction_candidates(blocks)": Edit(
        FUNCTIONS, "(block.last_accessed, block.priority, block.offset)", "(block.last_accessed, block.offset)"
    ),
    "fn memory_pressure(allocated, total)": Edit(FUNCTIONS, "if total > 0 else 1.0", "if total > 0 else 0.0"),
    "fn should_defragment(stats, frag_threshold, min_block_size)": Edit(
        FUNCTIONS, "stats.largest_free_block < min_block_size", "stats.largest_free_block <= min_block_size"
    ),
    "fn estimate_oom_seconds(free_bytes, alloc_rate_bytes_per_sec)": Edit(
        FUNCTIONS, "if not alloc_rate_bytes_per_sec > 0:", "if alloc_rate_bytes_per_sec < 0:"
    ),
    "fn optimal_pool_size(peak_usage, headroom_factor, page_size)": Edit(
        FUNCTIONS, "Fraction(str(headroom_factor))", "Fraction(headroom_factor)"
    ),
    "struct MemoryPool": Edit(CORE, "        block.version += 1\n", ""),
    "MemoryPool.new(device)": Edit(POOL, "PoolCore(self._device.total_memory)", "PoolCore(0)"),
    "MemoryPool.allocate(request, now)": Edit(LISTS, "+ (above & -above).bit_length()]", "+ above.bit_length()]"),
    "MemoryPool.free(block_id)": Edit(CORE, "        del self._blocks[block_id]\n", ""),
    "MemoryPool.mark_cached(block_id)": Edit(CORE, 'if change == "cache" and block.status is PINNED:', "if False:"),
    "MemoryPool.pin(block_id)": Edit(
        CORE,
        "        self._change_status(block, PINNED)\n        return",
        "        self._change_status(block, ALLOCATED)\n        return",
    ),
    "MemoryPool.unpin(block_id)": Edit(CORE, 'if change == "unpin" and block.status is CACHED:', "if False:"),
    "MemoryPool.touch(block_id, now)": Edit(
        CORE, "            block.last_accessed = time\n", "            block.allocated_at = time\n"
    ),
    "MemoryPool.evict(needed)": Edit(CORE, "            if found >= needed:", "            if found > 0:"),
    "MemoryPool.defragment()": Edit(
        "forged/memory/pool/compaction.py", "return block.status is BlockStatus.PINNED", "return False"
    ),
    "MemoryPool.stats()": Edit(
        CORE,
        "            self._pinned_bytes,\n            self.cached_bytes,",
        "            self.cached_bytes,\n            self._pinned_bytes,",
    ),
    "MemoryPool.get_block(block_id)": Edit(
        POOL,
        "            block = self._core.find(block_id)\n",
        "            block = self._core.find(self._device.device_id)\n",
    ),
    "MemoryPool.blocks_for_tensor(tensor_id)": Edit(
        CORE,
        "return sorted(found, key=lambda block: block.offset)",
        "return sorted(found, key=lambda block: -block.offset)",
    ),
    "Integrate with `allocator::check_capacity` for capacity validation": Edit(
        CORE, "        if needed > self.total:\n", "        if needed > 2 * self.total:\n"
    ),
    "Use `queue::queue_pressure` pattern for memory pressure calculation": Edit(
        FUNCTIONS, "max(allocated / total, 0.0)", "max(1.0 - allocated / total, 0.0)"
    ),
    f"{CRITERIA}: All trait methods implemented with correct logic": Edit(
        LISTS, "islice(self.from_size(needed), PASSED_MAX)", "islice(self.largest_first(), PASSED_MAX)"
    ),
    "Alignment calculations handle edge cases (0, 1, non-power-of-2)": Edit(
        FUNCTIONS,
        'if not is_power_of_two(checked_size("alignment", alignment)):',
        'if not checked_size("alignment", alignment):',
    ),
    "Block splitting and merging work correctly": Edit(
        CORE, "        elif before.free_list is not None:\n", "        elif False:\n"
    ),
    "Eviction respects pinned status and uses LRU ordering": Edit(
        CORE,
        "        if block.status is CACHED:\n            self._forget_cached(block)\n        block.status = status",
        "        block.status = status",
    ),
    "Defragmentation preserves allocation semantics": Edit(
        CORE,
        "        block.offset = offset\n        if piece",
        "        block.offset, block.tensor_id = offset, None\n        if piece",
    ),
    "Thread-safe operations using Mutex appropriately": Edit(
        POOL, "        with self._lock:\n            return self._core.stats()", "        return self._core.stats()"
    ),
    "Alignment calculations (power of 2 edge cases)": Edit(
        FUNCTIONS,
        '(checked_size("size", size) + alignment - 1) & -alignment',
        'checked_size("size", size) & -alignment',
    ),
    "Best-fit allocation strategy": Edit(
        LISTS,
        "            if fits(hole.offset, hole.size, needed, alignment):\n",
        "            if hole.size >= needed:\n",
    ),
    "Block splitting and merging": Edit(
        CORE, "            self.holes.add(before)\n        if not rest:", "        if not rest:"
    ),
    "Eviction ordering (LRU)": Edit(
        CORE,
        "insort(self._cached, (block.last_accessed, block.priority, block.offset))",
        "self._cached.append((block.last_accessed, block.priority, block.offset))",
    ),
    "Fragmentation calculation": Edit(
        FUNCTIONS, "return (total - largest) / total if total", "return 1.0 - largest / total if total"
    ),
    "Concurrent allocations": Edit(CORE, "            hole.size -= needed\n", ""),
    "Edge cases (full pool, single block, etc.)": Edit(CORE, "        if not rest:\n", "        if rest < 0:\n"),
    f"{CRITERIA}: Minimum 25 test cases": "it counts tests, which no edit of the code changes",
    "Follow `events::deduplicate` pattern for ID-based operations": Edit(
        "forged/kernel/replies.py", "        return known.answer", "        return None"
    ),
    "Return `Result<T, String>` for fallible operations": Edit(ERRORS, '"memory_block_taken"', '""'),
    "Use descriptive error messages that include context": Edit(
        ERRORS, "has version {version}, and the handle {given}", "has another version"
    ),
    "Document public functions with `///` doc comments": Edit(
        POOL, "class MemoryPool:\n", "class MemoryPool:\n    device_count = 1\n"
    ),
    "Use `#[derive(Clone, Debug)]` for data structures": thawed("PoolStats"),
    "A test arranges, acts and asserts, and is named for function and scenario": (
        "it is about the names of tests, which no edit of the code changes"
    ),
}
