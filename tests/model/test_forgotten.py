"""A rewrite's caches are freed with it, so one process can run many rewrites."""

import gc
import weakref

from slapo_rewrite.code import file
from slapo_rewrite.emit.rewrite import rewrite
from tests.golden import ROOT


def test_no_file_is_kept(tmp_path, monkeypatch):
    (tmp_path / "own_gpt.py").write_text((ROOT / "tests/models/gpt.py").read_text())
    read, index = [], file.SourceFile._index

    def noting(own):
        read.append(weakref.ref(own))
        index(own)

    monkeypatch.setattr(file.SourceFile, "_index", noting)
    schedule = str(ROOT / "tests/models/gpt_schedule.py")
    rewrite(str(tmp_path / "own_gpt.py"), schedule, tries=lambda *_: None)
    file._parsed.cache_clear()  # it knows the last two texts, with their files
    gc.collect()
    assert read and not [own() for own in read if own() is not None]
