"""What users hold: rows of one sequence, ragged batches of them, and their files."""

from logitscope.logits.batch import LogitsBatch
from logitscope.logits.files import load, save
from logitscope.logits.sequence import Logits, TopK, check_same_vocabulary

__all__ = ["Logits", "LogitsBatch", "TopK", "check_same_vocabulary", "load", "save"]
