"""mmdet 3.x: a key in an extractor's config, a hook for a whole model, and a patch.

Importing this module, for which `custom_imports` asks, imports mmdet and registers two things that
do nothing until a config names them: the key `deterministic=dict(mode=...)` of every RoI extractor
and the hook `TruncdetHook`. The patch is for code that no config reaches.
"""

from __future__ import annotations

from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor
from mmengine.registry import HOOKS
from truncdet.integrations import _mmdet_extractor
from truncdet.integrations._mmdet_hook import TruncdetHook as TruncdetHook
from truncdet.integrations._mmdet_patch import TESTED as TESTED
from truncdet.integrations._mmdet_patch import is_patched as is_patched
from truncdet.integrations._mmdet_patch import mode as mode
from truncdet.integrations._mmdet_patch import patch as patch
from truncdet.integrations._mmdet_patch import patched as patched
from truncdet.integrations._mmdet_patch import unpatch as unpatch

_mmdet_extractor.install(BaseRoIExtractor)
# mmengine's own registry, so that mmdet, mmrotate and other children find the name.
HOOKS.register_module(module=TruncdetHook, force=True)
