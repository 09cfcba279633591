"""Whether transformers' own `add_adapter` works: a release of it may need a newer peft than there is."""

from __future__ import annotations

import peft
import pytest
import transformers
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

ADDS_ADAPTERS = Version(peft.__version__) >= Version(MIN_PEFT_VERSION)
WHY = f"add_adapter of transformers {transformers.__version__} needs peft {MIN_PEFT_VERSION}"
adds_adapters = pytest.mark.skipif(not ADDS_ADAPTERS, reason=WHY)
