import unittest
from types import SimpleNamespace
from unittest.mock import Mock, patch

import torch

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
)
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class TestSelectedRunners(unittest.TestCase):
    def updated(self, draft_path):
        """Which models are updated, on a server with this draft checkpoint."""
        runners = {
            role: SimpleNamespace(
                model_config=SimpleNamespace(model_path=path), weight_updater=Mock()
            )
            for role, path in (("target", "target"), ("draft", draft_path))
        }
        for runner in runners.values():
            runner.weight_updater.update_weights_from_disk.return_value = (True, "")
        manager = object.__new__(SchedulerWeightUpdaterManager)
        manager.tp_worker = SimpleNamespace(
            model_runner=runners["target"],
            weight_update_runners=lambda: [("target", runners["target"])],
        )
        manager.draft_worker = SimpleNamespace(
            weight_update_runners=lambda: [("draft", runners["draft"])]
        )
        manager.flush_cache = lambda **_: True
        manager.scheduler, manager.metrics_collector = Mock(), None
        request = UpdateWeightFromDiskReqInput(model_path="new")
        self.assertTrue(manager.update_weights_from_disk(request).success)
        return [
            role
            for role, runner in runners.items()
            if runner.weight_updater.update_weights_from_disk.called
        ]

    def test_draft_of_another_checkpoint_keeps_its_weights(self):
        self.assertEqual(self.updated("draft"), ["target"])

    def test_draft_of_the_same_checkpoint_is_updated(self):
        self.assertEqual(self.updated("target"), ["target", "draft"])


class LoaderOfPaths(DefaultModelLoader):
    """Loads the path in place of weights; those of "new" do not fit."""

    def __init__(self):
        pass

    def _get_weights_iterator(self, source):
        return iter([source.model_or_path])

    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        model.path = next(weights)
        if model.path == "new":
            raise ValueError("weights that do not fit")


class TestRollback(unittest.TestCase):
    def test_old_weights_come_back_after_an_error(self):
        model = torch.nn.Module()
        config = SimpleNamespace(model_path="old", revision=None, dtype=torch.float32)
        updater = weight_updater.WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=config,
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=Mock(),
            recapture_cuda_graph=Mock(),
            get_model_runner=Mock(),
        )
        with patch.multiple(
            weight_updater,
            get_model=lambda: SimpleNamespace(weight_cache_mode="off"),
            get_available_gpu_memory=lambda *_, **__: 0.0,
            get_model_loader=lambda *_: LoaderOfPaths(),
            get_pp_stage_load_group=lambda: None,
        ):
            success, message = updater.update_weights_from_disk("new", "auto")
        self.assertFalse(success)
        self.assertIn("do not fit", message)
        self.assertEqual((model.path, config.model_path), ("old", "old"))


if __name__ == "__main__":
    unittest.main()
