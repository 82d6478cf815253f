"""One decoder that reads and draws: words, and the codes of pictures, in one sequence (UM³).

A picture enters by its codes, each projected as the vector it is, or by the features they were made of; it is drawn in
codes, each in a few groups of digits, one given those before it. What stands where is said twice: by rotation, which
tells how far apart two tokens are, and by a learned row for every place, without which no token knows its own column.

B batch, L tokens, n tokens of a piece, h × w codes of a picture, N = h·w, W width, d width of a code, G groups
"""

from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import LearnedPositions, Plan, Work, cost

READ, DRAW, HIDDEN = range(3)  # what stands before a picture that is given, before one to be drawn, and for no code yet


class UnifiedConfig(Config):
    """
    groups  into which the id of a code is cut to be drawn; each has a vocabulary of its own
    order   "raster" draws code after code, each seeing those before; "masked" sees all of the picture that there is
    sees    what pictures are read by: their codes, or the encoder's features
    """

    decoder: DecoderConfig
    codec: CodecConfig
    groups: int = 1
    order: Literal["raster", "masked"] = "raster"
    sees: Literal["codes", "features"] = "codes"


class GroupHead(nn.Module):
    """(…, W) → the digits of an id, group by group: the second given the first, and so on."""

    def __init__(self, width: int, sizes: tuple[int, ...]):
        super().__init__()
        self.sizes = sizes
        self.given = nn.ModuleList([nn.Embedding(size, width) for size in sizes[:-1]])
        self.mix = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in sizes[1:]])
        self.out = nn.ModuleList([nn.Linear(width, size) for size in sizes])

    def logits(self, x: Tensor, before: Tensor) -> Tensor:
        """x (…, W), the g groups so far (…, g) → (…, size) of the next"""
        g = before.shape[-1]
        for i in range(g):
            x = x + self.mix[i](x + self.given[i](before[..., i]))
        return self.out[g](x)

    def forward(self, x: Tensor, parts: Tensor) -> list[Tensor]:
        """x (…, W), parts (…, G) → the logits of each group, given the true ones before it"""
        found = [self.out[0](x)]
        for g in range(1, len(self.sizes)):
            x = x + self.mix[g - 1](x + self.given[g - 1](parts[..., g - 1]))
            found.append(self.out[g](x))
        return found


class Piece(NamedTuple):
    """A run of words, or a picture: its mark and its codes."""

    x: Tensor  # (B, n, W)
    real: Tensor | None = None  # (B, n) which tokens are there; all unless given
    since: Tensor | None = None  # (B, n) of words in turns: the place in the piece where a token's turn begins
    grid: tuple[int, int] | None = None  # of a picture
    both: bool = False  # read both ways


class Laid(NamedTuple):
    """Pieces one behind the other."""

    x: Tensor  # (B, L, W)
    positions: Tensor  # (B, L) or, for rotary layouts of several axes, (B, L, 3)
    plan: Plan
    ends: tuple[int, ...]  # where each piece ends


class Unified(nn.Module):
    """Pieces through one decoder. The codec is a part of it, and learns nothing here."""

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        self.config = config
        self.decoder, self.codec = Decoder(config.decoder), Codec(config.codec)
        quantizer, W = self.codec.quantizer, config.decoder.block.width
        if len(quantizer.sizes) != 1:
            raise ConfigError(
                f"{type(quantizer).__name__} gives {len(quantizer.sizes) or 'no'} ids a code, and one is drawn",
                "use a quantizer with one id a code, such as FSQ, BSQ or VQ",
            )
        seen = self.codec.wide if config.sees == "features" else quantizer.width
        self.read, self.code = nn.Linear(seen, W), nn.Linear(quantizer.width, W)
        self.marks = nn.Embedding(3, W)
        self.head = GroupHead(W, quantizer.groups(config.groups))
        self.place = LearnedPositions(self.grid, W)
        nn.init.normal_(self.marks.weight, std=0.02)
        nn.init.zeros_(self.place.table)

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Parts that learn nothing here, and must come from elsewhere."""
        return ("codec",)

    def train(self, mode: bool = True) -> "Unified":
        super().train(mode)
        self.codec.eval()  # its codebook's running means, too, stay as they are
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """Codes of the pictures that the codec was made for."""
        height, width = self.codec.size
        return height // self.codec.factor, width // self.codec.factor

    # ---- pictures -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """pixels (B, C, H, W) in −1 … 1 → what is read of them (B, h, w, ·), ids (B, h, w)"""
        features = self.codec.features(pixels.to(self.code.weight.dtype))
        found = self.codec.quantize(features)
        assert found.ids is not None
        return (features if self.config.sees == "features" else found.codes), found.ids

    def parts(self, ids: Tensor) -> Tensor:
        """ids (…) → (…, G)"""
        return self.codec.quantizer.split(ids, self.config.groups)

    def join(self, parts: Tensor) -> Tensor:
        """(…, G) → ids (…)"""
        return self.codec.quantizer.join(parts)

    @torch.no_grad()
    def pixels(self, ids: Tensor) -> Tensor:
        """ids (B, h, w) → pixels (B, C, H, W) within −1 … 1"""
        return self.codec.decode(self.codec.lookup(ids)).clamp(-1, 1)

    # ---- pieces -------------------------------------------------------------------------------------------------

    def words(self, ids: Tensor, counts: Tensor | None = None, since: Tensor | None = None) -> Piece:
        """ids (B, n), of which the first `counts` (B,) of each row are there; in turns that know nothing of each other,
        where it is said since which place a token's own goes (B, n)"""
        places = torch.arange(ids.shape[1], device=ids.device)
        return Piece(self.decoder.embed(ids), None if counts is None else places < counts[:, None], since)

    def shown(self, seen: Tensor) -> Piece:
        """A picture to be read: what `look` gives (B, h, w, ·)"""
        return self._picture(READ, self.read(seen), both=True)

    def drawn(self, ids: Tensor, hidden: Tensor | None = None) -> Piece:
        """A picture to be drawn, as far as it is: ids (B, h, w), `hidden` (B, h, w) where there is no code yet"""
        codes = self.codec.quantizer.lookup(ids.where(~hidden, 0) if hidden is not None else ids)
        x = self.code(codes.detach().to(self.code.weight.dtype))
        if hidden is not None:
            x = torch.where(hidden[..., None], self.marks.weight[HIDDEN], x)
        return self._picture(DRAW, x, both=self.config.order == "masked")

    def token(self, ids: Tensor, at: Tensor, grid: tuple[int, int]) -> Tensor:
        """Codes (…) at places (…) of a picture to be drawn, counted row by row → (…, W)"""
        codes = self.codec.quantizer.lookup(ids)
        return self.code(codes.to(self.code.weight.dtype)) + self.place(*grid)[at]

    def _picture(self, mark: int, x: Tensor, *, both: bool) -> Piece:
        B, h, w, _ = x.shape
        first = self.marks.weight[mark].expand(B, 1, -1)
        return Piece(torch.cat([first, x.flatten(1, 2) + self.place(h, w)], 1), grid=(h, w), both=both)

    def lay(self, *pieces: Piece) -> Laid:
        """One behind the other. A picture's codes stand at their row and column, counted on from the words before it;
        the words behind go on from the far corner (Qwen2-VL's rule)."""
        x = torch.cat([piece.x for piece in pieces], 1)
        B, device = len(x), x.device
        start = torch.zeros(B, 1, dtype=torch.long, device=device)
        flat = self.config.decoder.rotary.layout == "1d"
        positions, spans, segments = [], [], []
        for number, piece in enumerate(pieces, 1):
            n = piece.x.shape[1]
            real = torch.ones(B, n, dtype=torch.bool, device=device) if piece.real is None else piece.real
            if piece.grid is None:
                # No sum where all are there: torch 2.11's compiler sees through it, and trips over what it finds.
                every = piece.real is None
                steps = torch.arange(n, device=device) if every else (real.long().cumsum(1) - 1).clamp(min=0)
                steps = steps if piece.since is None else steps - piece.since
                place = (start + steps)[..., None].expand(-1, -1, 3)
                start = start + real.sum(1, keepdim=True)
            else:
                place, after = _on_grid(piece.grid, flat, device)
                place, start = start[..., None] + place, start + after
            positions.append(place)
            spans.append(torch.full((B, n), number if piece.both else 0, device=device))
            turn = real.long() if piece.since is None else (piece.since + 2) * real
            segments.append(turn - 1)  # what is not there is seen by nothing that is
        where = torch.cat(positions, 1)
        span = torch.cat(spans, 1) if any(piece.both for piece in pieces) else None
        apart = any(piece.since is not None for piece in pieces)
        cut = apart or any(piece.real is not None for piece in pieces)
        segment = torch.cat(segments, 1) if cut else None
        first = pieces[0]
        plan = Plan(
            causal=True,
            segments=segment,
            key_segments=segment,
            spans=span,
            key_spans=span,
            common=apart,
            lead=first.x.shape[1] if first.both and first.real is None and len(pieces) > 1 else 0,
        )
        ends = tuple(accumulate(piece.x.shape[1] for piece in pieces))
        return Laid(x, where[..., 0] if flat else where, plan, ends)

    def hidden(self, laid: Laid, since: int = 0) -> Tensor:
        """(B, L − since, W): what the heads read, of the tokens from a place on"""
        if self.decoder.trims:
            return self.decoder.through(laid.x, laid.positions, laid.plan, asked=since)
        return self.decoder.through(laid.x, laid.positions, laid.plan)[:, since:]

    # ---- losses -------------------------------------------------------------------------------------------------

    def code_losses(self, hidden: Tensor, ids: Tensor, z: float = 0.0) -> Tensor:
        """hidden (…, W), ids (…) → (…): −log p of each code, all groups together, and z · logsumexp² of each group"""
        parts = self.parts(ids)
        total = hidden.new_zeros(ids.shape, dtype=torch.float32)
        for g, logits in enumerate(self.head(hidden, parts)):
            logits = logits.float()
            lse = logits.logsumexp(-1)
            total = total + lse - logits.gather(-1, parts[..., g, None])[..., 0] + z * lse.square()
        return total

    def drawing_states(self, laid: Laid, hidden: Tensor) -> Tensor:
        """The states (B, N, W) that say each code of the last piece: in raster order the one before it, else its own"""
        first, last = (laid.ends[-2] if len(laid.ends) > 1 else 0), laid.ends[-1]
        return hidden[:, first : last - 1] if self.config.order == "raster" else hidden[:, first + 1 : last]

    def forward(self, *pieces: Piece) -> Tensor:
        return self.hidden(self.lay(*pieces))

    def work(self, batch: int = 1, words: int = 0) -> Work:
        """So many pictures, each with so many words: a sequence in which all see what came before."""
        h, w = self.grid
        return Work.causal(1 + h * w + words, batch)


def _on_grid(grid: tuple[int, int], flat: bool, device: torch.device) -> tuple[Tensor, int]:
    """(1, 1 + N, 3) where the mark and the codes of a picture stand, from 0 on, and where what follows begins"""
    h, w = grid
    if min(grid) < 1:
        raise ImageError(f"a picture of {h} × {w} codes", "give at least one")
    if flat:
        return torch.arange(1 + h * w, device=device)[None, :, None].expand(-1, -1, 3), 1 + h * w
    row, column = torch.arange(h, device=device), torch.arange(w, device=device)
    zero = torch.zeros(h, w, dtype=torch.long, device=device)
    codes = torch.stack([zero, row[:, None] + zero, column + zero], -1).view(1, -1, 3) + 1
    return F.pad(codes, (0, 0, 1, 0)), 1 + max(h, w)


@cost.flops.register
def _(module: Unified, work: Work) -> int:
    """Of the decoder; the codec and the small heads are their own."""
    return cost.flops(module.decoder, work)


@cost.bytes.register
def _(module: Unified, work: Work) -> cost.Bytes:
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return cost.Bytes(weights=size, read=size)
