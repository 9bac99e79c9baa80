"""Training that repeats bit for bit: reproducible accumulation for detection operators."""

from truncdet import fixedpoint as fixedpoint
from truncdet import testing as testing
from truncdet._build import build_info as build_info
from truncdet._digest import Digest as Digest
from truncdet._digest import digest as digest
from truncdet._errors import TruncdetError as TruncdetError
from truncdet._grid_sample import grid_sample as grid_sample
from truncdet._ms_deform_attn import ms_deform_attn as ms_deform_attn
from truncdet._roi_align import RoIAlign as RoIAlign
from truncdet._roi_align import roi_align as roi_align
from truncdet._scatter import index_add as index_add
from truncdet._scatter import scatter_add as scatter_add
from truncdet._seed import generator as generator
from truncdet._snap import snap as snap
from truncdet._status import status as status
from truncdet._sticky import check as check
from truncdet._switch import deterministic as deterministic
from truncdet._switch import disable as disable
from truncdet._switch import enable as enable
from truncdet._truncate import truncate as truncate
from truncdet._version import __version__ as __version__
from truncdet._wrap import wrap as wrap
