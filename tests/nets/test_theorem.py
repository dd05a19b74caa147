"""Re λ(S - D) <= 0 for S skew and D >= 0: checked on random and trained layers, and what it does not cover."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rheoscope.nets.kinds import Damped

from .models import tiny, tokens

ROUNDING = 1e-12  # relative to the norm: eigvals is backward stable, n eps is 3e-14 at n = 120


def generators(model, text):
    """S - D of every layer in float64: [layer batch head query query]."""
    taken = []

    def take(module, inputs, named):
        taken.append(module.generator(inputs[0], named["rotation"]))

    modules = [module for module in model.modules() if isinstance(module, Damped)]
    hooks = [module.register_forward_pre_hook(take, with_kwargs=True) for module in modules]
    with torch.no_grad():
        model(text)
    for hook in hooks:
        hook.remove()
    return torch.stack(taken)


def random_generators(_trained):
    return generators(tiny("sd"), tokens())


def linear_generators(_trained):
    return generators(tiny("sd_linear", positions="rotary"), tokens())


def trained_generators(trained):
    model = AutoModelForCausalLM.from_pretrained(trained.folder).double().eval()
    return generators(model, torch.arange(1, 33).repeat(2, 1))


@pytest.mark.parametrize("drawn", [random_generators, linear_generators, trained_generators])
def test_no_eigenvalue_of_the_unmasked_generator_has_a_positive_real_part(drawn, trained):
    L = drawn(trained)
    damping = -L.diagonal(dim1=-2, dim2=-1)
    real = torch.linalg.eigvals(L).real
    slack = ROUNDING * torch.linalg.matrix_norm(L)
    assert (damping > 0).all()
    assert (real.amax(-1) <= slack).all()
    # Re λ = -v*Dv lies between the largest and the smallest damping.
    assert (real.amax(-1) <= -damping.amin(-1) + slack).all()
    assert (real.amin(-1) >= -damping.amax(-1) - slack).all()


def test_a_symmetric_part_breaks_it_so_the_check_can_fail():
    L = random_generators(None)
    tilted = L + 2 * torch.eye(L.shape[-1], dtype=L.dtype) * -L.diagonal(dim1=-2, dim2=-1)[..., None]
    assert (torch.linalg.eigvals(tilted).real.amax(-1) > 0).all()


def test_the_theorem_does_not_cover_the_causally_masked_matrix_that_the_layer_uses():
    L = random_generators(None)
    masked = L.tril()
    damping = -L.diagonal(dim1=-2, dim2=-1)
    # Its eigenvalues are the -d_i, whatever S is ...
    real = torch.linalg.eigvals(masked).real.sort(-1).values
    torch.testing.assert_close(real, (-damping).sort(-1).values, rtol=0, atol=1e-9)
    # ... but its symmetric part is indefinite: it amplifies some vectors, which S - D never does.
    growth = torch.linalg.eigvalsh(masked + masked.mT)[..., -1] / 2
    assert (growth > 1).all()
    time = 0.1
    gain, bounded = (torch.linalg.matrix_norm(torch.matrix_exp(time * A), ord=2) for A in (masked, L))
    assert (bounded <= 1).all()
    assert (gain > 1).any()
