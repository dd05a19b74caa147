"""Configuration of the decoder: which attention each layer has, how large its heads are, norms and positions."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from rheoscope.errors import RheoscopeError

# kind -> what it is. The order is that of the documentation.
KINDS = {
    "softmax": "scores q·k, softmax",
    "sd": "scores S - D, softmax: S = (QK' - KQ')/sqrt(d_head) is skew, D = diag(softplus(w·h + c))",
    "sd_linear": "(sum over j < i of S_ij v_j, less d_i v_i) / sqrt(i)",
    "elu": "linear attention with features elu(x) + 1",
    "sd_elu": "the same features on [q; k] and [k; -q]",
    "ega": "softmax times a gate on each key, standardised over the tokens up to it",
    "ega_published": "the same, standardised over the whole sequence: the future leaks into it",
    "lag_conv": "softmax of scores averaged over five neighbouring keys with learned weights",
}
# These keep a state of constant size instead of keys and values.
LINEAR_KINDS = frozenset({"sd_linear", "elu", "sd_elu"})
POSITIONS = ("learned", "rotary", "morlet")


def per_layer(value: object, n_layers: int, name: str) -> list:
    """One entry per layer: a list as it is, anything else repeated."""
    entries = list(value) if isinstance(value, list | tuple) else [value] * n_layers
    if len(entries) != n_layers:
        raise RheoscopeError(
            f"{name} has {len(entries)} entries for {n_layers} layers: give one value, or one per layer"
        )
    return entries


@strict
class RheoscopeConfig(PreTrainedConfig):
    """Shape of a decoder. `attention` and `head_dims` hold one entry per layer; a single value is repeated.

    `use_norm = False` removes every norm, the final one too. `head_dims` defaults to hidden_size / heads.
    `initializer_range` is GPT-2's 0.02 by default, and 1/sqrt(hidden_size) without norms: nothing then restores the
    size of a stream that starts small, and S-D takes three times the steps to the same loss.
    """

    model_type = "rheoscope_decoder"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012  the name and type transformers looks for

    vocab_size: int = 50257
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    max_position_embeddings: int = 1024
    attention: str | list[str] = "softmax"
    head_dims: int | list[int] | None = None
    use_norm: bool = True
    positions: str = "learned"
    rope_theta: float = 10000.0
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    dropout: float = 0.0
    initializer_range: float | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    layer_types: list[str] | None = None
    number_of_conv_states: int = 2  # a linear layer caches two tensors: its state, and how many tokens it has seen

    def __post_init__(self, **kwargs: object) -> None:
        self.attention = per_layer(self.attention, self.num_hidden_layers, "attention")
        self._refuse_unknown()
        if self.head_dims is None:
            if self.hidden_size % self.num_attention_heads:
                raise RheoscopeError(
                    f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads: "
                    "choose another number of heads, or give head_dims"
                )
            self.head_dims = self.hidden_size // self.num_attention_heads
        self.head_dims = per_layer(self.head_dims, self.num_hidden_layers, "head_dims")
        self._refuse_heads_that_do_not_fit()
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.initializer_range is None:
            self.initializer_range = 0.02 if self.use_norm else self.hidden_size**-0.5
        linear = [kind in LINEAR_KINDS for kind in self.attention]
        self.layer_types = ["linear_attention" if is_linear else "full_attention" for is_linear in linear]
        super().__post_init__(**kwargs)

    def _refuse_unknown(self) -> None:
        for kind in self.attention:
            if kind not in KINDS:
                raise RheoscopeError(f"no attention kind is called {kind!r}; the kinds are {', '.join(KINDS)}")
        if self.positions not in POSITIONS:
            raise RheoscopeError(f"no positions are called {self.positions!r}; there are {', '.join(POSITIONS)}")
        if self.positions == "morlet" and self.hidden_size % 2:
            raise RheoscopeError(f"Morlet positions fill pairs of coordinates; hidden_size {self.hidden_size} is odd")

    def _refuse_heads_that_do_not_fit(self) -> None:
        for layer, d_head in enumerate(self.head_dims):
            if not 0 < d_head <= self.hidden_size:
                raise RheoscopeError(
                    f"d_head {d_head} asked for in layer {layer}; it must lie in 1 to hidden_size = {self.hidden_size}"
                )
            if self.positions == "rotary" and d_head % 2:
                raise RheoscopeError(
                    f"d_head {d_head} asked for in layer {layer}; rotary positions turn pairs of coordinates: use an "
                    "even d_head or learned positions"
                )

    @property
    def uses_rotary(self) -> bool:
        """Whether positions are turned into queries and keys."""
        return self.positions == "rotary"

    @property
    def num_key_value_heads(self) -> int:
        """As many as query heads: keys are not shared."""
        return self.num_attention_heads
