"""Mutants of the rows of distributed_checkpoint_api.md."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Constant, Edit, Mutation

CHECKPOINT = "forged/checkpoint/checkpoint.py"
MODEL = "forged/checkpoint/model.py"
ERRORS = "forged/checkpoint/errors.py"
LISTING = "forged/checkpoint/storage/listing.py"
LOCATIONS = "forged/checkpoint/storage/locations.py"
FAULTS = "forged/checkpoint/storage/fault_handler.py"
PIPELINE = "forged/checkpoint/saving/pipeline.py"
RANK_SAVE = "forged/checkpoint/saving/rank_save.py"
CONSOLIDATION = "forged/checkpoint/saving/files/consolidation.py"
LOADER = "forged/checkpoint/loading/loader.py"
VALIDATOR = "forged/checkpoint/verification/validator.py"
COMPRESSION = "forged/checkpoint/format/compression.py"
RANK_GROUP = "forged/checkpoint/rank_group.py"

PARTS = (
    "DistributedCheckpoint.DistributedCheckpoint("
    "coordinator, storage = null, faultHandler = null, validator = null, logger = null)"
)
ERROR = (
    'CheckpointException.CheckpointException(message, checkpointPath = "", type = ExceptionType.Unknown, '
    "innerException = null)"
)

MUTANTS: Mapping[str, Mutation | str] = {
    "class DistributedCheckpoint": Edit(
        CHECKPOINT, "            model.load_state_dict(state[MODEL])\n", "            pass\n"
    ),
    PARTS: Edit(CHECKPOINT, "self._validator = validator or Check", "self._validator = Check"),
    "DistributedCheckpoint.SaveAsync(model, optimizer, options = null, cancellationToken = default)": Edit(
        PIPELINE,
        "            written = await run_in_thread(reduce_and_write, token)\n",
        "            if save.is_root:\n"
        "                self._context.storage.publish(save.agreement.prefix + listing.SUFFIX, b'{}')\n"
        "            written = await run_in_thread(reduce_and_write, token)\n",
    ),
    "DistributedCheckpoint.LoadAsync(model, optimizer, options = null, cancellationToken = default)": Edit(
        "forged/checkpoint/loading/matching.py",
        "                self.arrays.append(value)\n",
        "                self.arrays.append(value.copy())\n",
    ),
    "DistributedCheckpoint.SaveModelOnlyAsync(model, options = null, cancellationToken = default)": Edit(
        CHECKPOINT, "return await self.save(model, None, options)", "return await self.save(model, model, options)"
    ),
    "DistributedCheckpoint.ListCheckpointsAsync(cancellationToken = default)": Edit(
        CHECKPOINT, "key=lambda info: (info.timestamp, info.prefix)", "key=lambda info: info.prefix"
    ),
    "DistributedCheckpoint.DeleteCheckpointAsync(checkpointPrefix, cancellationToken = default)": Edit(
        LISTING, "storage.delete({*(part.file for part in manifest.own_parts), *own})", "storage.delete(own[:0])"
    ),
    "DistributedCheckpoint.GenerateCheckpointPrefix(options)": Edit(
        LISTING, "checkpoint_{datetime", "checkpoint-{datetime"
    ),
    "DistributedCheckpoint.SerializeState(modelState, optimizerState)": Edit(
        "forged/checkpoint/format/tree.py",
        'return {"t" if isinstance(value, tuple) else "l": inner}',
        'return {"t": inner}',
    ),
    "DistributedCheckpoint.CollectTensorInfo(modelState, optimizerState)": Edit(
        "forged/checkpoint/saving/files/parts.py",
        "        boxes=boxes,\n        box_of=box_of,\n        digests=base64.b64encode(image",
        "        boxes=[],\n        box_of=[],\n        digests=base64.b64encode(image",
    ),
    "DistributedCheckpoint.DeserializeState(shards)": Edit(
        "forged/checkpoint/format/boxes.py", "slice(start - outer_start, start - outer_start + size)", "slice(0, size)"
    ),
    "class SaveOptions": Edit(MODEL, "include_rng_state: bool = True,", "include_rng_state: bool = False,"),
    "SaveOptions.CheckpointPrefix": Edit(
        PIPELINE, "prefix = options.checkpoint_prefix or listing", "prefix = options.checkpoint_prefix or 'x' + listing"
    ),
    "SaveOptions.Format = CheckpointFormat.MultiShard": Edit(
        MODEL,
        "format: CheckpointFormat | str = CheckpointFormat.MULTI_SHARD,",
        "format: CheckpointFormat | str = CheckpointFormat.SINGLE_FILE,",
    ),
    "SaveOptions.CompressionLevel = CompressionLevel.None": Edit(
        MODEL,
        "compression_level: CompressionLevel | str = CompressionLevel.NONE",
        "compression_level: CompressionLevel | str = CompressionLevel.FAST",
    ),
    "SaveOptions.IncludeOptimizer = true": Edit(
        CHECKPOINT, "if optimizer is not None and options.include_optimizer:", "if optimizer is not None:"
    ),
    "SaveOptions.IncludeRngState = true": Edit(CHECKPOINT, "if options.include_rng_state:", "if options:"),
    "SaveOptions.Timeout": Edit(
        CHECKPOINT,
        "token = CancelToken(self._timeout_s if timeout is None else timeout)",
        "token = CancelToken(self._timeout_s if kind is ExceptionType.SAVE_FAILED else timeout)",
    ),
    "SaveOptions.CustomMetadata = new()": Edit(
        MODEL, "custom_metadata=_as_json(custom_metadata)", "custom_metadata=custom_metadata"
    ),
    "enum CheckpointFormat": Edit(
        MODEL, "class CheckpointFormat(StrEnum):\n", 'class CheckpointFormat(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "CheckpointFormat.SingleFile": Edit(
        RANK_SAVE, "layout is CheckpointFormat.SINGLE_FILE and self.world_size > 1", "self.world_size < 1"
    ),
    "CheckpointFormat.MultiShard": Edit(
        RANK_SAVE,
        "layout is CheckpointFormat.SINGLE_FILE and self.world_size > 1",
        "layout is not CheckpointFormat.CONSOLIDATED and self.world_size > 1",
    ),
    "CheckpointFormat.Consolidated": Edit(
        CONSOLIDATION, "if layout is CheckpointFormat.CONSOLIDATED:", "if layout is CheckpointFormat.MULTI_SHARD:"
    ),
    "enum CompressionLevel": Edit(
        MODEL, "class CompressionLevel(StrEnum):\n", 'class CompressionLevel(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "CompressionLevel.None": Edit(
        PIPELINE,
        "if save.options.compression_level is CompressionLevel.NONE or save.has_whole_tensor_files:",
        "if save.has_whole_tensor_files:",
    ),
    "CompressionLevel.Fast": Edit(
        COMPRESSION,
        "if level is CompressionLevel.NONE or not itemsize",
        "if level in (CompressionLevel.NONE, CompressionLevel.FAST) or not itemsize",
    ),
    "CompressionLevel.Balanced": Edit(COMPRESSION, "{CompressionLevel.BALANCED: 3, ", "{"),
    "CompressionLevel.Maximum": Edit(
        COMPRESSION,
        "    planes = _split(np.frombuffer(data, np.uint8), width_of(itemsize))\n",
        "    level = CompressionLevel.BALANCED if level is CompressionLevel.MAXIMUM else level\n"
        "    planes = _split(np.frombuffer(data, np.uint8), width_of(itemsize))\n",
    ),
    "class LoadOptions": Edit(MODEL, "        skip_validation: bool = False,", "        skip_validation: bool = True,"),
    "LoadOptions.CheckpointPrefix": Edit(
        CHECKPOINT, "if not options.checkpoint_prefix:", "if options.checkpoint_prefix is None:"
    ),
    "LoadOptions.LoadOptimizer = true": Edit(
        MODEL, "            load_optimizer=load_optimizer,\n", "            load_optimizer=True,\n"
    ),
    "LoadOptions.LoadRngState = true": Edit(
        MODEL, "            load_rng_state=load_rng_state,\n", "            load_rng_state=True,\n"
    ),
    'LoadOptions.ReshardingStrategy = "parallel"': Edit(
        LOADER, "and strategy is ReshardingStrategy.SIMPLE:", "and strategy is ReshardingStrategy.PARALLEL:"
    ),
    "LoadOptions.Timeout": Edit(
        CHECKPOINT,
        "token = CancelToken(self._timeout_s if timeout is None else timeout)",
        "token = CancelToken(self._timeout_s if kind is ExceptionType.LOAD_FAILED else timeout)",
    ),
    "LoadOptions.SkipValidation = false": Edit(CHECKPOINT, "None if options.skip_validation else self", "self"),
    "LoadOptions.StrictMode = true": Edit(LOADER, "if not self._options.strict_mode or not", "if not"),
    "class CheckpointLoadResult": Edit(CHECKPOINT, "model_state=loaded.state.get(MODEL)", "model_state=model"),
    "CheckpointLoadResult.Metadata": Constant(CHECKPOINT, "CheckpointLoadResult.metadata", "None"),
    "CheckpointLoadResult.ModelState": Constant(CHECKPOINT, "CheckpointLoadResult.model_state", "None"),
    "CheckpointLoadResult.OptimizerState": Constant(CHECKPOINT, "CheckpointLoadResult.optimizer_state", "None"),
    "CheckpointLoadResult.SourceWorldSize": Constant(CHECKPOINT, "CheckpointLoadResult.source_world_size", "1"),
    "CheckpointLoadResult.TargetWorldSize": Constant(CHECKPOINT, "CheckpointLoadResult.target_world_size", "1"),
    "CheckpointLoadResult.WasResharded": Constant(CHECKPOINT, "CheckpointLoadResult.was_resharded", "True"),
    "class CheckpointInfo": Edit(
        CHECKPOINT, "found = [listing.info_of(manifest) for", "found = [listing.info_of(manifest) and manifest for"
    ),
    "CheckpointInfo.Prefix": Constant(MODEL, "CheckpointInfo.prefix", '"a"'),
    "CheckpointInfo.Version": Constant(MODEL, "CheckpointInfo.version", '"1"'),
    "CheckpointInfo.Timestamp": Constant(MODEL, "CheckpointInfo.timestamp", "0.0"),
    "CheckpointInfo.WorldSize": Constant(MODEL, "CheckpointInfo.world_size", "0"),
    "CheckpointInfo.SizeBytes": Constant(MODEL, "CheckpointInfo.size_bytes", "0"),
    "CheckpointInfo.Format": Constant(MODEL, "CheckpointInfo.format", "CheckpointFormat.MULTI_SHARD"),
    "class CheckpointException": Edit(
        ERRORS, "class CheckpointException(ForgedError):", "class CheckpointException(Exception):"
    ),
    "CheckpointException.CheckpointPath": Edit(
        ERRORS, "        self.checkpoint_path = checkpoint_path\n", '        self.checkpoint_path = ""\n'
    ),
    "CheckpointException.Type": Edit(
        ERRORS, "        self.type = type\n", "        self.type = ExceptionType.UNKNOWN\n"
    ),
    ERROR: Edit(
        ERRORS,
        "type: ExceptionType = ExceptionType.UNKNOWN,",
        "type: ExceptionType = ExceptionType.SAVE_FAILED,",
    ),
    "CheckpointException.CheckpointException(message, innerException)": Edit(
        ERRORS, 'checkpoint_path: str = "",', 'checkpoint_path: str = "?",'
    ),
    "enum ExceptionType": Edit(
        ERRORS, "class ExceptionType(StrEnum):\n", 'class ExceptionType(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "ExceptionType.Unknown": Edit(ERRORS, '"unknown"', '"other"'),
    "ExceptionType.SaveFailed": Edit(ERRORS, '"save_failed"', '"save"'),
    "ExceptionType.LoadFailed": Edit(ERRORS, '"load_failed"', '"load"'),
    "ExceptionType.ValidationFailed": Edit(ERRORS, '"validation_failed"', '"validation"'),
    "ExceptionType.CorruptedCheckpoint": Edit(ERRORS, '"corrupted_checkpoint"', '"corrupted"'),
    "ExceptionType.IncompatibleVersion": Edit(ERRORS, '"incompatible_version"', '"version"'),
    "ExceptionType.Timeout": Edit(ERRORS, '"timeout"', '"late"'),
    "ExceptionType.StorageError": Edit(ERRORS, '"storage_error"', '"storage"'),
    "DistributedCheckpointFactory.Create(coordinator, options = null)": Edit(
        CHECKPOINT, "return DistributedCheckpoint(coordinator, storage,", "return DistributedCheckpoint(None, storage,"
    ),
    "class CheckpointOptions": Edit(
        CHECKPOINT, "integrity_checkers: Sequence[IntegrityChecker] = ()", "integrity_checkers: Any = None"
    ),
    "CheckpointOptions.Storage = new()": Edit(
        CHECKPOINT,
        "storage = create_storage(options.storage)",
        'storage = create_storage(StorageOptions("memory", {}))',
    ),
    "CheckpointOptions.RetryPolicy = new()": Edit(
        CHECKPOINT, "FaultToleranceHandler(storage, options.retry_policy", "FaultToleranceHandler(storage, None"
    ),
    "CheckpointOptions.IntegrityCheckers = new()": Edit(
        CHECKPOINT,
        "CheckpointValidator(storage, options.integrity_checkers, ",
        "CheckpointValidator(storage, (), ",
    ),
    "CheckpointOptions.CompatibilityCheckers = new()": Edit(
        CHECKPOINT, "options.integrity_checkers, options.compatibility_checkers)", "options.integrity_checkers)"
    ),
    "CheckpointOptions.DefaultTimeout = TimeSpan.FromMinutes(10)": Edit(
        CHECKPOINT, ", default_timeout=options.default_timeout)", ")"
    ),
    "Used, not declared.IStateful": Edit(
        MODEL,
        "    def load_state_dict(self, state: Any) -> object: ...",
        "    def load_state_dict(self, state: Any) -> object: ...\n\n    def state(self) -> object: ...",
    ),
    "Used, not declared.IStateful.GetStateDict()": Edit(
        MODEL, "    def state_dict(self) -> Any:", "    def get_state_dict(self) -> Any:"
    ),
    "Used, not declared.IStateful.LoadStateDict(state)": Edit(
        MODEL, "    def load_state_dict(self, state: Any)", "    def set_state_dict(self, state: Any)"
    ),
    "Used, not declared.IDistributedCoordinator": Edit(
        RANK_GROUP, "await self._within_time(self._coordinator.broadcast(answer, 0))", "answer"
    ),
    "Used, not declared.IDistributedCoordinator.Rank": Edit(
        RANK_GROUP, "self.rank = coordinator.rank", "self.rank = 1 - coordinator.rank"
    ),
    "Used, not declared.IDistributedCoordinator.WorldSize": Edit(
        RANK_GROUP, "self.world_size = coordinator.world_size", "self.world_size = 1"
    ),
    "Used, not declared.ICheckpointStorage": Edit(
        "forged/checkpoint/storage/object_store/objects.py",
        "check_name(name)\n        storage = self.bounded(token)\n",
        "name = check_name(name)[:-1]\n        storage = self.bounded(token)\n",
    ),
    "Used, not declared.StorageFactory.Create(options)": Edit(
        LOCATIONS, 'LocalStorage(settings.get("base_path", "./checkpoints"))', 'LocalStorage("./checkpoints")'
    ),
    "Used, not declared.StorageOptions": Edit(MODEL, '{"base_path": "./checkpoints"}', '{"base_path": "./checkpoint"}'),
    "Used, not declared.StorageOptions.Provider": Edit(LOCATIONS, "if provider not in PROVIDERS:", "if not provider:"),
    "Used, not declared.StorageOptions.ConnectionSettings": Edit(
        LOCATIONS, 'settings.get("prefix", "").strip("/")', '""'
    ),
    "`IFaultToleranceHandler`, `FaultToleranceHandler`": Edit(
        FAULTS, "return RetryingStorage(storage, self)", "return storage"
    ),
    "Used, not declared.FaultToleranceHandler.ExecuteWithRetryAsync(action)": Edit(
        FAULTS, "                self._sleep(pause_s)\n", "                pass\n"
    ),
    "Used, not declared.FaultToleranceHandler.RollbackAsync(path)": Edit(
        LISTING, "    storage.delete(names)\n    return names", "    return names"
    ),
    "Used, not declared.RetryPolicy": Edit("forged/retry.py", "delay_max_s: float = 30.0", "delay_max_s: float = 60.0"),
    "`ICheckpointValidator`, `CheckpointValidator`": Edit(
        VALIDATOR, "        if deep:\n            results.append", "        if not deep:\n            results.append"
    ),
    "Used, not declared.CheckpointValidator.ValidateCheckpointAsync(path)": Edit(
        VALIDATOR, "if len(self.found) < FINDINGS_MAX:", "if len(self.found) < 1:"
    ),
    "Used, not declared.IIntegrityChecker": Edit(
        VALIDATOR, "(*integrity_checkers, *compatibility_checkers)", "(*compatibility_checkers,)"
    ),
    "Used, not declared.ICompatibilityChecker": Edit(
        VALIDATOR, "(*integrity_checkers, *compatibility_checkers)", "(*integrity_checkers,)"
    ),
    "Used, not declared.ValidationResult": Edit(
        VALIDATOR, "            yield from one._all()\n", "            yield from ()\n"
    ),
    "Used, not declared.ValidationResult.IsValid": Edit(
        VALIDATOR, "return not self.errors", "return bool(self.errors)"
    ),
    "Used, not declared.ValidationResult.HasWarnings": Edit(
        VALIDATOR, "return [finding for finding in self._all() if not finding.is_error]", "return []"
    ),
    "Used, not declared.ValidationResult.GetSummary()": Edit(VALIDATOR, 'return "\\n".join(lines)', "return lines[0]"),
    "Used, not declared.CheckpointMetadata": Edit(PIPELINE, "            step=run.step if", "            step=None if"),
    "Saving a Checkpoint": Edit(CHECKPOINT, "state = {MODEL: _state_of(model, MODEL)}", "state = {MODEL: {}}"),
    "Loading a Checkpoint": Edit(
        CHECKPOINT, "            optimizer.load_state_dict(state[OPTIMIZER])\n", "            pass\n"
    ),
    "Listing Checkpoints": Edit(LISTING, "        manifest.size_bytes,\n", "        len(manifest.parts),\n"),
    "Test save/load roundtrip": Edit(
        "forged/checkpoint/format/tree.py",
        'return {"t" if isinstance(value, tuple) else "l": inner}',
        'return {"t": inner}',
    ),
    "Test with different options": Edit(
        PIPELINE, "            layout=options.format,\n", "            layout=CheckpointFormat.MULTI_SHARD,\n"
    ),
    "Test error handling and exceptions": Edit(
        FAULTS, "        return act()\n\n    def rollback", "        return None\n\n    def rollback"
    ),
    "Test checkpoint listing": Edit(
        LISTING, "return sorted(prefix for prefix in found if", "return sorted(prefix for prefix in list(found)[:1] if"
    ),
    "Test checkpoint deletion": Edit(LISTING, "        storage.delete([tombstone])\n", "        pass\n"),
    "Test timeout handling": Edit(
        CHECKPOINT,
        "return await run_in_thread(infos, CancelToken(self._timeout_s))",
        "return await run_in_thread(infos, CancelToken(None))",
    ),
    "Test resharding scenarios": Edit(
        CHECKPOINT,
        "            world_size=ranks.world_size,\n            options",
        "            world_size=manifest.world_size,\n            options",
    ),
    "Clean, intuitive API surface": Edit(
        "forged/checkpoint/blocking.py", "return results[0].state", "return results[0]"
    ),
    "Consistent naming conventions": Edit(
        "forged/checkpoint/blocking.py", "    prepare = blocking(DistributedCheckpoint.prepare)\n", ""
    ),
    "Comprehensive error handling": Edit(
        FAULTS, "                if not error.retryable:\n                    raise\n", "                raise\n"
    ),
    "Flexible configuration options": Edit(CHECKPOINT, "self._faults = fault_handler or Fault", "self._faults = Fault"),
    "Well-documented usage": Edit(
        "forged/checkpoint/saving/files/parts.py", "data_offset=len(header),", "data_offset=len(header) - 4096,"
    ),
    "Support for common checkpointing scenarios": Edit(
        "forged/checkpoint/format/boxes.py",
        "min(a_from + a_size, b_from + b_size)",
        "min(a_from + a_size, b_from + b_size) - 1",
    ),
}
