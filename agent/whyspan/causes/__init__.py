"""Root causes, one file each: from a critical path to segments with a cause and a culprit."""

from __future__ import annotations

from whyspan.causes.classify import Classified, classify, rule_out
from whyspan.causes.context import Context
from whyspan.causes.rule import Claim, Rule, rules

__all__ = ["Claim", "Classified", "Context", "Rule", "classify", "rule_out", "rules"]
