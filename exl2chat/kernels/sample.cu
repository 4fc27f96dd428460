// From the logits of a step to its tokens, and on to the state from which the next step begins:
// penalties, temperature, top-k, top-p, min-p in this order, then the draw by Gumbel-max, as engine/sampler.py has them.
//
//     score    scores = penalised logits / temperature; the best of them
//     weigh    how many scores, and how much probability, lie 0/24 to 1/24, 1/24 to 2/24, ... below the best
//     choose   the bins that top-k and top-p keep whole, and the one or few that they cut; the token drawn
//
// Probabilities exp(score - best) are integers, 2^42 for the best, so that their sums do not depend on their order. A
// token more than 1024/24 = 42.7 below the best is left out: the noise of two tokens differs by at most 40.4.
//
// layout    Problem and Row, below; logits [rows, stride] float32, of which the first `count` are tokens
// launch    grid (ceil(count / 1024), rows), 256 threads, for all three
// limits    count at most 2^20. NaN or a best that is infinite gives the token -1 (and 0 as the next step's)
// numerics  penalties float64 and the quotient float32, as NumPy rounds them; noise the same bits, its logarithms float64;
//           float32 exp within 2 ulp, as NumPy's: a token whose probability top-p ends in may differ by 1e-7 of the sum.
//           Bit-equal at every call
// reference Sampler of exl2chat/engine/sampler.py; tests/gpu/test_sample.py

#include "cut.cuh"
#include "gumbel.cuh"
#include "penalties.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) score(const Problem p) {
    release_successor();
    await_predecessor();
    const Row& row = p.rows[blockIdx.y];
    const float temperature = row.greedy ? 1 : row.temperature;
    const int newest = row.seen ? *row.position : 0;
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int id = (blockIdx.x * EACH + i) * THREADS + threadIdx.x;
        if (id >= p.count) break;
        float score = p.logits[(size_t)blockIdx.y * p.stride + id];
        if (row.seen) score = penalized(score, id, row, newest);
        score = __fadd_rn(__fdiv_rn(score, temperature), 0);  // no -0: as likely as 0, it would have another key
        p.scores[(size_t)blockIdx.y * p.count + id] = score;
        best = max(best, key_of(score, id));
    }
    best = reduce(best, [](u64 a, u64 b) { return max(a, b); });
    if (threadIdx.x == 0) atomicMax(&p.shared[blockIdx.y].best, best);
}

__device__ __forceinline__ bool is_number(u64 best) { return isfinite(score_of(best)); }

extern "C" __global__ void __launch_bounds__(THREADS) weigh(const Problem p) {
    __shared__ u32 counts[BINS], low[BINS], high[BINS];  // weights in two halves: shared memory adds 32 bits at a time
    release_successor();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = low[bin] = high[bin] = 0;
    await_predecessor();
    const Row& row = p.rows[blockIdx.y];
    Shared& shared = p.shared[blockIdx.y];
    const bool counted = row.top_k, weighed = row.top_p < 1;
    const u64 first = shared.best;
    if (row.greedy || !(counted || weighed) || !is_number(first)) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int id = (blockIdx.x * EACH + i) * THREADS + threadIdx.x;
        if (id >= p.count) break;
        const float below = score_of(first) - p.scores[(size_t)blockIdx.y * p.count + id];
        const int bin = bin_of(below);
        if (bin == BINS) continue;
        if (counted) atomicAdd(counts + bin, 1);
        if (!weighed) continue;
        const u64 weight = weight_of(below);
        atomicAdd(low + bin, (u32)weight & ((1u << HALF) - 1));
        atomicAdd(high + bin, (u32)(weight >> HALF));
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        const u64 weight = ((u64)high[bin] << HALF) + low[bin];
        if (counts[bin]) atomicAdd(shared.counts + bin, counts[bin]);
        if (weight) atomicAdd(shared.weights + bin, weight);
    }
}

// The draw of this block from the bins that are kept whole; the tokens of the others go to `list`.
__device__ __forceinline__ Pick draw_kept(const Problem& p, const Cut& cut, Draw& draw, float least, Shared& shared) {
    float scores[EACH];
    bool kept[EACH];
    u64* list = p.list + (size_t)blockIdx.y * p.count;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int id = (blockIdx.x * EACH + i) * THREADS + threadIdx.x;
        kept[i] = id < p.count;
        if (!kept[i]) continue;
        scores[i] = p.scores[(size_t)blockIdx.y * p.count + id];
        const int bin = bin_of(draw.best - scores[i]);
        if (bin >= cut.first && bin <= cut.last) list[atomicAdd(&shared.listed, 1)] = key_of(scores[i], id);
        kept[i] = bin < cut.first && scores[i] >= least;
        if (kept[i]) draw.rough(scores[i], id);
    }
    draw.share();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (kept[i]) draw.exact(scores[i], (blockIdx.x * EACH + i) * THREADS + threadIdx.x);
    return reduce(draw.pick, likelier);
}

// The draw of the row from the listed tokens that are kept, and from what the blocks have drawn.
__device__ __forceinline__ int draw_last(const Problem& p, const Row& row, const Cut& cut, Draw draw, float least,
                                         Shared& shared) {
    const u64* list = p.list + (size_t)blockIdx.y * p.count;
    const int length = __ldcg(&shared.listed);
    if (length) {
        const u64 last = max(least_key(row, cut, list, length, draw.best), key_of(least, (1 << ID_BITS) - 1));
        for (int i = threadIdx.x; i < length; i += THREADS) {
            const u64 key = __ldcg(list + i);
            if (key >= last) draw.rough(score_of(key), id_of(key));
        }
        draw.share();
        for (int i = threadIdx.x; i < length; i += THREADS) {
            const u64 key = __ldcg(list + i);
            if (key >= last) draw.exact(score_of(key), id_of(key));
        }
    }
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) {
        const Pick* other = p.picks + blockIdx.y * gridDim.x + i;
        draw.pick = likelier({__ldcg(&other->value), __ldcg(&other->id), 0}, draw.pick);
    }
    return reduce(draw.pick, likelier).id;
}

// By one block: the token becomes part of the sequence, and what the blocks share is as it was before.
__device__ __forceinline__ void finish(const Row& row, int token, Shared& shared) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.counts[bin] = shared.weights[bin] = 0;
    if (threadIdx.x) return;
    shared.best = shared.listed = shared.arrived = 0;
    const int newest = *row.position + 1;
    *row.position = newest;
    *row.token = max(token, 0);
    row.results[newest & row.mask] = token;
    if (row.seen && token >= 0) count_token(row, token, newest);
}

extern "C" __global__ void __launch_bounds__(THREADS) choose(const Problem p) {
    __shared__ bool last;
    release_successor();
    await_predecessor();
    const Row& row = p.rows[blockIdx.y];
    Shared& shared = p.shared[blockIdx.y];
    const u64 first = shared.best;
    if (row.greedy || !is_number(first)) {
        if (blockIdx.x == 0) finish(row, is_number(first) ? id_of(first) : -1, shared);
        return;
    }
    const float best = score_of(first), least = __fadd_rn(best, row.least);
    const Cut cut = find_cut(row, shared);
    Draw draw(splitmix(row.seed, *row.position + 1), best);
    const Pick pick = draw_kept(p, cut, draw, least, shared);
    if (threadIdx.x == 0) {
        p.picks[blockIdx.y * gridDim.x + blockIdx.x] = pick;
        __threadfence();
        last = atomicAdd(&shared.arrived, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const int token = draw_last(p, row, cut, Draw(draw.seed, best), least, shared);
    finish(row, token, shared);
}
