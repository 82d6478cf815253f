from vitrail.data.scenes.frame_sprites import FRAMES, INNER_FRACTION, draw_frame_sprites


def test_frames_are_square_smooth_and_free_in_the_middle():
    sprites = list(draw_frame_sprites())
    assert [s.name for s in sprites] == list(FRAMES) and {s.kind for s in sprites} == {"frame"}
    for sprite in sprites:
        opacity = sprite.rgba[..., 3]
        side = len(opacity)
        assert opacity.any(0).all() and opacity.any(1).all()  # reaches all four edges
        rim = int(side * (1 - INNER_FRACTION) / 2)
        middle = sprite.rgba[rim:-rim, rim:-rim]
        assert (middle == middle[0, 0]).all(), sprite.name  # one colour, or nothing at all
        assert len(set(opacity.flatten().tolist())) > 2 or sprite.name == "square"
