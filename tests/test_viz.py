import base64
import re

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.image import imread

from attnkit import viz

PNG = b"\x89PNG\r\n\x1a\n"


def picture(path):
    """The pixels [H, W, 4] of a PNG."""
    assert path.read_bytes().startswith(PNG)
    return imread(path)


def a_map(rows=3, columns=4, title="Hungarian"):
    weights = torch.rand(rows, columns).softmax(-1)
    return viz.HeatMap(
        title, weights, [f"r{i}" for i in range(rows)], [f"c{i}" for i in range(columns)]
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_heat_maps_are_a_picture(tmp_path, count):
    maps = [a_map(3 + i) for i in range(count)]
    path = viz.heat_maps(maps, tmp_path / "new" / "a.png", title="t", caption="machine")
    pixels = picture(path)
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 200


def test_a_heavier_weight_is_brighter(tmp_path):
    one = viz.HeatMap("", torch.tensor([[0.0, 1.0]]), ["r"], ["a", "b"])
    pixels = picture(viz.heat_maps([one], tmp_path / "a.png"))
    dark, bright = (0x00 / 255, 0x22 / 255, 0x4E / 255), (0xFE / 255, 0xE8 / 255, 0x38 / 255)

    def columns_of(colour):
        near = abs(pixels[..., :3] - torch.tensor(colour).numpy()).max(-1) < 0.03
        return near[:, : pixels.shape[1] // 2].sum(), near.nonzero()[1].min()

    assert columns_of(dark)[0] > 100
    assert columns_of(dark)[1] < columns_of(bright)[1]  # weight 0 is in the left column


def test_heat_maps_need_a_map_and_matching_labels(tmp_path):
    with pytest.raises(ValueError, match="maps is empty"):
        viz.heat_maps([], tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"weights is \(2, 3\), expected \(2, 4\)"):
        viz.HeatMap("", torch.zeros(2, 3), ["a", "b"], list("abcd"))


def test_a_picture_is_the_same_bytes_again(tmp_path):
    one = a_map()
    first = viz.heat_maps([one], tmp_path / "a.png").read_bytes()
    assert viz.heat_maps([one], tmp_path / "b.png").read_bytes() == first


def test_fonts_are_found_only_for_what_they_can_draw():
    assert viz.fonts_for("Größe, Ещё, ő") == ["DejaVu Sans"]
    assert viz.fonts_for("\U000e0041") is None  # no font draws a language tag


def test_training_curves_are_a_picture(tmp_path):
    path = viz.training_curves(
        [4.0, 3.0, 2.0],
        [1e-3, 2e-3, 1e-3],
        {"dates": [(2, 0.1), (3, 0.9)], "translations": [(2, 0.2), (3, 1.0)]},
        tmp_path / "t.png",
        floor=1.0,
        target=0.995,
    )
    assert picture(path).shape[1] > 800


def test_smoothing_keeps_a_constant():
    assert viz._smooth([3.0] * 5) == pytest.approx([3.0] * 5)


def results(memory=1 << 20):
    from attnkit.benchmark import Results, Row

    rows = [
        Row(
            group="B1 H2 forward",
            operation="forward",
            implementation=name,
            backend=name,
            shape={},
            dtype="fp32",
            mask="full",
            device="cpu",
            seconds=(1e-3 * (i + 1),),
            best=1e-3,
            batch=1,
            flops=1e6,
            extra_bytes=memory,
        )
        for i, name in enumerate(("attnkit", "torch", "naive"))
    ]
    return Results.here(rows, {})


@pytest.mark.parametrize("memory", [1 << 20, 0, None])
def test_speed_bars_are_a_picture(tmp_path, memory):
    pixels = picture(viz.speed_bars(results(memory), tmp_path / "s.png"))
    blue = torch.tensor([0x00 / 255, 0x72 / 255, 0xB2 / 255]).numpy()
    assert (abs(pixels[..., :3] - blue).max(-1) < 0.02).sum() > 100


def test_an_embedded_picture_is_the_file(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG + b"rest")
    text = viz.embedded(tmp_path / "a.png")
    assert base64.b64decode(text.removeprefix("data:image/png;base64,")) == PNG + b"rest"


@pytest.mark.parametrize(("weight", "colour"), [(0.0, "255,255,255"), (1.0, "64,140,205")])
def test_cells_run_from_white_to_blue(weight, colour):
    assert viz.cell_style(weight) == f"background:rgb({colour})"
    assert re.fullmatch(r"background:rgb\(\d+,\d+,\d+\)", viz.cell_style(weight + 1e-7))


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.23456e-5, "0.0123"), (0.0456, "45.6"), (0.9994, "999"), (1.11, "1110")]
)
def test_milliseconds(seconds, text):
    assert viz.milliseconds(seconds) == text


def test_a_confusion_matrix_shows_shares_of_its_rows(tmp_path):
    path = viz.confusion_matrix([[8, 0], [1, 1]], ["yes", "no"], tmp_path / "a.png", title="t")
    pixels = picture(path)
    white, dark = (1.0, 1.0, 1.0), (0x08 / 255, 0x30 / 255, 0x6B / 255)
    dark_rows, dark_columns = (
        abs(pixels[..., :3] - torch.tensor(dark).numpy()).max(-1) < 0.02
    ).nonzero()
    assert len(dark_rows) > 500  # the one cell whose row has nothing else
    assert dark_rows.max() < 0.6 * pixels.shape[0]
    assert dark_columns.max() < 0.75 * pixels.shape[1]
    assert tuple(pixels[0, 0, :3]) == white
    with pytest.raises(ValueError, match="counts is not square, of 2 classes"):
        viz.confusion_matrix([[1, 2], [3]], ["a", "b"], path)


def test_validation_losses_are_drawn_beside_the_training_loss(tmp_path):
    def drawn(name, **more):
        losses = [3.0, 2.0, 1.0]
        exact = {"validation": [(1, 0.5)]}
        return picture(viz.training_curves(losses, losses, exact, tmp_path / name, **more))

    green = torch.tensor((0x00, 0x9E, 0x73)).numpy() / 255
    plain = drawn("a.png", share_label="right (%)")
    with_losses = drawn("b.png", validation_losses=[(1, 2.5), (3, 1.5)])
    counts = [int((abs(p[..., :3] - green).max(-1) < 0.02).sum()) for p in (plain, with_losses)]
    assert counts[1] > counts[0] + 300
