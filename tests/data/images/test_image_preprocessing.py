"""Conversations about images: prepared from each form that they come in, and read again with their pixels."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets, open_sequential_dataset
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.data_config import DataConfig
from mega_data.images.image_pixels import prepare_image
from mega_data.images.image_preprocessing import ImageOptions, preprocess_image_chats
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.token_files.dataset_info import DatasetInfo
from mega_data.token_files.merge_datasets import merge_datasets

WORDS = ["[UNK]", "<image>", "<user>", "<end>", "what", "is", "it", "red", "blue", "and"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }} "
    "{% else %}{% generation %}{{ m.content }}<end>{% endgeneration %}{% endif %}{% endfor %}"
)
VISION = VisionConfig(
    num_layers=1, hidden_size=4, ffn_hidden_size=4, num_attention_heads=1, image_size=8, patch_size=4, image_token=1
)
EACH = VISION.tokens_per_image


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in WORDS[1:4]])
    folder = tmp_path / "tok"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    return folder


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (10, 12)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "png")
    return out.getvalue()


RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))


def image_conversation(answer: str, images: int = 1) -> list[dict[str, str]]:
    return [{"from": "human", "value": "<image>\n" * images + "what is it"}, {"from": "gpt", "value": answer}]


def preprocess_images(tmp_path: Path, tokenizer: Path, source: Path, **more: Any) -> DatasetInfo:
    limit, options = more.pop("max_length", None), ImageOptions(tmp_path / "pictures", EACH)
    return preprocess_image_chats(
        [source], tokenizer, tmp_path / "data", ChatOptions(max_length=limit), options, **more
    )


def llava(tmp_path: Path, records: list[dict[str, Any]]) -> Path:
    (tmp_path / "pictures").mkdir(exist_ok=True)
    for name, content in (("red.png", RED), ("blue.png", BLUE)):
        (tmp_path / "pictures" / name).write_bytes(content)
    (tmp_path / "llava.json").write_text(json.dumps(records))
    return tmp_path / "llava.json"


def opened(tmp_path: Path, vision: VisionConfig | None = VISION, **fields: Any) -> BlendedDataset:
    raw = {"train": str(tmp_path / "data"), "kind": "conversations", "split": "1", "seq_length": 32, **fields}
    config = DataConfig.parse({"cache": tmp_path / "cache", **raw})
    return build_blended_datasets(config, seed=1, samples={"train": 1}, eod=3, vision=vision)[0]


def check(sample: TrainingSample, colours: dict[str, bytes]) -> int:
    """Each answer stands behind the image that it names; returns the number of images."""
    assert sample.images is not None
    seen, at = {}, dict(zip(sample.images.placeholder_positions.tolist(), sample.images.features.tolist(), strict=True))
    assert sorted(at) == np.flatnonzero(sample.tokens == 1).tolist()
    for place in np.flatnonzero(sample.loss_weights):
        word = WORDS[sample.labels[place]]
        if word in colours:
            document = sample.document_ids == sample.document_ids[place]  # type: ignore[index]
            first = at[int(np.flatnonzero(document & (sample.tokens == 1))[0])]
            seen[word] = first
            np.testing.assert_array_equal(
                sample.images.pixels[first // EACH], prepare_image(colours[word], VISION).pixels[0]
            )
    assert seen
    return len(sample.images.pixels)


def test_llava_json_and_a_folder(tmp_path: Path, tokenizer: Path) -> None:
    source = llava(tmp_path, [
        {"id": "1", "image": "red.png", "conversations": image_conversation("red")},
        {"image": "blue.png", "conversations": image_conversation("blue")},
        {"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "it"}]},
    ])  # fmt: skip
    info = preprocess_images(tmp_path, tokenizer, source)
    assert (info.documents, info.images and info.images.tokens) == (3, EACH)
    data = opened(tmp_path)
    assert check(data[0], {"red": RED, "blue": BLUE}) == 2
    assert data[0].images.features.max() == 2 * EACH - 1
    with pytest.raises(DataError, match="has images, which requires a model with a vision encoder"):
        opened(tmp_path, None)
    other = VISION.model_copy(update={"image_size": 12})
    with pytest.raises(DataError, match="has 4 placeholders 1 per image, but the model has 9"):
        opened(tmp_path, other)[0]


def test_shards_of_webdataset(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as shard:
        parts = {
            "a/1.png": RED, "a/1.json": json.dumps({"conversations": image_conversation("red")}).encode(), "a/2.png": BLUE,
            "a/2.txt": b"blue",
        }  # fmt: skip
        for name, content in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    preprocess_images(tmp_path, tokenizer, path)
    assert check(opened(tmp_path)[0], {"red": RED, "blue": BLUE}) == 2


def test_tables_with_images_in_them(tmp_path: Path, tokenizer: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what is it"}]
    rows = [
        {
            "images": [{"bytes": image, "path": None}],
            "messages": [
                {"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}
            ],
        }
        for image, answer in ((RED, "red"), (BLUE, "blue"))
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    preprocess_images(tmp_path, tokenizer, tmp_path / "t.parquet")
    assert check(opened(tmp_path)[0], {"red": RED, "blue": BLUE}) == 2
    with tarfile.open(tmp_path / "data.images.tar") as shard:
        assert [shard.extractfile(member).read() for member in shard] == [RED, BLUE]  # type: ignore[union-attr]


def test_a_document_that_is_cut_has_the_images_of_its_pieces(tmp_path: Path, tokenizer: Path) -> None:
    names = ["red.png", "blue.png", "red.png"]
    preprocess_images(
        tmp_path,
        tokenizer,
        llava(tmp_path, [{"image": names, "conversations": image_conversation("red and blue and red", 3)}]),
    )
    data = opened(tmp_path, seq_length=6)
    found = []
    for number in range(4):
        sample = data[number]
        if sample.images is not None:
            assert (np.diff(sample.images.features) == 1).all()
            pixels = sample.images.pixels[sample.images.features[0] // EACH]
            found += [(int(sample.images.features[0]), "red" if pixels[0].mean() > pixels[2].mean() else "blue")]
    assert sorted(found) == [(0, "red"), (1, "blue"), (3, "red")]  # later pieces begin within an image


def test_images_in_tiles_have_placeholders_by_their_sizes(tmp_path: Path, tokenizer: Path) -> None:
    """Whole and cut documents stand for the features of their images, one after another; an image that changed is named."""
    vision = VISION.model_copy(update={"pinpoints": ((8, 16), (24, 8)), "resize": "stretch"})
    options = ImageOptions(tmp_path / "pictures", EACH, vision=vision)
    source = llava(
        tmp_path, [{"image": ["red.png", "wide.png"], "conversations": image_conversation("red and blue", 2)}]
    )
    pictures = [RED, picture((0, 0, 255), (31, 9))]
    (tmp_path / "pictures/wide.png").write_bytes(pictures[1])
    info = preprocess_image_chats([source], tokenizer, tmp_path / "data", ChatOptions(), options)
    assert info.images is not None
    assert info.images.pinpoints == vision.pinpoints
    seen = [prepare_image(content, vision) for content in pictures]
    assert len({len(one.pixels) for one in seen}) == len({one.features.size for one in seen}) == 2
    whole = [
        (one.pixels[row // vision.features_per_tile].tobytes(), row % vision.features_per_tile)
        for one in seen
        for row in one.features.tolist()
    ]
    for length, samples in ((64, 1), (6, 6)):
        data, found = opened(tmp_path, vision, seq_length=length), []
        for number in range(samples):
            images = data[number].images
            if images is not None:
                rows = images.features.tolist()
                own = [
                    (images.pixels[row // vision.features_per_tile].tobytes(), row % vision.features_per_tile)
                    for row in rows
                ]
                found += [at for at in range(len(whole)) if whole[at : at + len(own)] == own][:1]
                assert (data[number].tokens[images.placeholder_positions] == 1).all()
        assert len(found) > samples // 2
        assert len(found) == sum(data[number].images is not None for number in range(samples))
    with pytest.raises(DataError, match="and other tiles: None"):
        opened(tmp_path, VISION)[0]
    (tmp_path / "pictures/wide.png").write_bytes(RED)
    with pytest.raises(DataError, match=r"wide\.png: the size of the image has changed"):
        opened(tmp_path, vision, seq_length=64)[0]


def test_the_placeholder_is_the_models(tmp_path: Path, tokenizer: Path) -> None:
    options = ImageOptions(tmp_path, EACH, "<image>", vision=VISION.model_copy(update={"image_token": 5}))
    with pytest.raises(DataError, match="'<image>' is token 1, but the model's placeholder is 5"):
        preprocess_image_chats([llava(tmp_path, [])], tokenizer, tmp_path / "data", ChatOptions(), options)


def test_what_is_bad_is_named(tmp_path: Path, tokenizer: Path) -> None:
    records = [
        {"image": "none.png", "conversations": image_conversation("red")}, {"image": "red.png", "conversations": image_conversation("red", 2)},
        {"image": 7, "conversations": image_conversation("red")}, {"image": "red.png", "conversations": image_conversation("red")},
        {"video": "red.mp4", "conversations": image_conversation("red")},
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "red.mp4"}]}, {"role": "assistant", "content": "red"}]},
    ]  # fmt: skip
    source = llava(tmp_path, records)
    with pytest.raises(DataError, match=r"llava.json:1: .*none.png: cannot be read \(No such file"):
        preprocess_images(tmp_path, tokenizer, source)
    assert not (tmp_path / "data.idx").exists()
    info = preprocess_images(tmp_path, tokenizer, source, on_bad_line="skip")
    assert (info.documents, info.skipped.bad) == (1, 5)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "data.quarantine.jsonl").read_text().splitlines()]
    assert "1 image(s), but the text has <image> 2 times" in " ".join(reasons)
    assert sum("videos are not supported" in reason for reason in reasons) == 2
    with pytest.raises(DataError, match="has no token "):
        preprocess_image_chats(
            [source], tokenizer, tmp_path / "x", ChatOptions(), ImageOptions(tmp_path, EACH, "<picture>")
        )


def test_an_image_that_is_damaged_later(tmp_path: Path, tokenizer: Path) -> None:
    preprocess_images(
        tmp_path, tokenizer, llava(tmp_path, [{"image": "red.png", "conversations": image_conversation("red")}])
    )
    (tmp_path / "pictures" / "red.png").write_bytes(RED[:40])
    with pytest.raises(DataError, match=r"sample 5 of .*data: image 0 of document 0, red.png: the image"):
        opened(tmp_path)[5]
    left = opened(tmp_path, on_bad_sample="skip")[5]
    assert left.images is None
    assert not left.loss_weights.any()


def test_what_would_lose_images_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    preprocess_images(
        tmp_path, tokenizer, llava(tmp_path, [{"image": "red.png", "conversations": image_conversation("red")}])
    )
    with pytest.raises(DataError, match="data: has images, and cannot be merged"):
        merge_datasets([tmp_path / "data", tmp_path / "data"], tmp_path / "both")
    with pytest.raises(DataError, match="has images, and cannot be evaluated here"):
        open_sequential_dataset(tmp_path / "data", 8)


def test_a_limit_cuts_what_placeholders_became(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"image": "red.png", "conversations": image_conversation("red and blue")}]
    info = preprocess_images(tmp_path, tokenizer, llava(tmp_path, records), max_length=EACH + 6)
    assert (info.tokens, info.chat and info.chat.cut) == (EACH + 6, 1)


def test_what_a_model_wants_around_an_image(tmp_path: Path, tokenizer: Path) -> None:
    source = llava(tmp_path, [{"image": "red.png", "conversations": image_conversation("red")}])
    options = ImageOptions(tmp_path / "pictures", EACH, text="and <image> it")
    preprocess_image_chats([source], tokenizer, tmp_path / "data", ChatOptions(), options)
    tokens = [WORDS[token] for token in opened(tmp_path)[0].tokens[: EACH + 4]]
    assert tokens == ["<user>", "and", *["<image>"] * EACH, "it", "what"]
    with pytest.raises(DataError, match="must contain <image> exactly once"):
        preprocess_image_chats([source], tokenizer, tmp_path / "x", ChatOptions(), replace(options, text="it"))


def test_moved_pictures_are_found_where_the_run_says(tmp_path: Path, tokenizer: Path) -> None:
    preprocess_images(
        tmp_path, tokenizer, llava(tmp_path, [{"image": "red.png", "conversations": image_conversation("red")}])
    )
    (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    assert check(opened(tmp_path, image_folder=tmp_path / "elsewhere")[0], {"red": RED}) == 1


def test_images_that_keep_their_shape(tmp_path: Path, tokenizer: Path) -> None:
    """As many placeholders as their sizes say, between what the model wants around; pieces and whole documents have their own."""
    native = {"window": 8, "full_layers": (), "min_pixels": 64, "max_pixels": 1024}
    vision = VisionConfig.parse(
        {
            **VISION.model_dump(), "native": native, "activation": "swiglu", "class_token": False, "pre_norm": False,
            "feature_layer": -1, "projector": "merger", "begin_token": 8, "end_token": 9,
        },
        source="test",
    )  # fmt: skip
    options = ImageOptions(tmp_path / "pictures", vision.tokens_per_image, vision=vision)
    source = llava(
        tmp_path, [{"image": ["red.png", "wide.png"], "conversations": image_conversation("red and blue", 2)}]
    )
    pictures = [RED, picture((0, 0, 255), (31, 9))]
    (tmp_path / "pictures/wide.png").write_bytes(pictures[1])
    info = preprocess_image_chats([source], tokenizer, tmp_path / "data", ChatOptions(), options)
    assert info.images is not None
    assert info.images.sizes == (8, 64, 1024)
    data = opened(tmp_path, vision, seq_length=64)
    images, tokens = data[0].images, data[0].tokens
    assert images is not None
    sizes = [one.shape[1:] for one in images.pixels]
    assert sizes == [(16, 8), (8, 32)]
    assert (tokens[images.placeholder_positions] == 1).all()
    assert images.features.tolist() == list(range(2 + 4))
    assert [
        tokens[at + step] for at, step in ((images.placeholder_positions[0], -1), (images.placeholder_positions[1], 1))
    ] == [8, 9]
    for one, content in zip(images.pixels, pictures, strict=True):
        np.testing.assert_array_equal(one, prepare_image(content, vision).pixels[0])
    pieces = [data[number].images for data in [opened(tmp_path, vision, seq_length=5)] for number in range(4)]
    assert sum(len(one.placeholder_positions) for one in pieces if one is not None) == 6
    with pytest.raises(DataError, match="and other sizes: None"):
        opened(tmp_path, VISION)[0]
