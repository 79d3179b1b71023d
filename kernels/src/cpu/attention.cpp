// Variable-length paged attention: prefill chunks and decodes alike.
//
// Keys are cut into splits of PAGED_SPLIT_TOKENS at absolute positions, whatever the block size, and gathered into the
// packed layout of the linears, so that both products of attention are products of `product.hpp`:
//
//   item = a tile of rows (tokens x query heads of one kv head) over its splits
//   split:   scores [rows, tokens] = q @ packed keys        weights = exp(scores - their row's maximum), 0 where hidden
//            part   [rows, head_dim] = weights @ packed values
//
// A row's maximum, sum and part of a split depend on the row alone; tokens that it does not see add exact zeros. The
// parts are joined in the order of the splits, at once or, where a step has too few tiles for its threads, after all
// splits were computed as items of their own: the operations on a row are the same.
//
// Decodes whose first blocks are the very same ones share the gathering of those splits, and their rows one product:
// their parts are computed before, and taken from there when it is their turn to be joined.
#include "gather.hpp"
#include "math.hpp"
#include "product.hpp"
#include "scratch.hpp"
#include "tables.hpp"

namespace paged::PAGED_VARIANT {

// Query rows (tokens x heads of a group) of a tile, about, and how many of them are attended at a time.
constexpr int64_t TILE_QUERIES = 64, ATTEND_ROWS = round_up(24, PASS_ROWS);

int64_t attention_tile_rows(const PagedAttention* shape) {
    return most(1, TILE_QUERIES / (shape->num_heads / shape->num_kv_heads));
}

namespace {

// ---- one tile

template <class T>
class Attend {
public:
    using X = Operand<T>;

    Attend(const PagedAttention& p, void* scratch) : p_(p), depth_(round_up(p.head_dim, PAGED_BLOCK_K)) {
        Scratch room(scratch);
        const int64_t queries = whole_passes(p.tile_rows * (p.num_heads / p.num_kv_heads));
        width_ = round_up(p.head_dim, 16);
        q_ = room.take<X>(queries * depth_);
        keys_ = room.take<X>(SPLIT * depth_);
        values_ = room.take<X>(SPLIT * width_);
        scores_ = room.take<float>(ATTEND_ROWS * SCORES_STRIDE);
        weights_ = room.take<X>(ATTEND_ROWS * WEIGHTS_STRIDE);
        part_ = room.take<float>(queries * width_);
        part_peak_ = room.take<float>(queries);
        part_sum_ = room.take<float>(queries);
        joined_ = room.take<float>(queries * width_);
        peak_ = room.take<float>(queries);
        sum_ = room.take<float>(queries);
    }

    // Keys and values that are wanted next: they are fetched while this item's are gathered.
    void expect(const Tile& tile, int64_t split) {
        ahead_tile_ = tile;
        ahead_ = span_of(p_, tile, split);
        if (ahead_.tokens() <= 0 || split < tile.shared_splits) {  // nothing is gathered there
            ahead_ = {0, 0};
            ahead_tile_.table = nullptr;
        }
    }

    // All splits of a tile, to the output. What comes after it is in `next`, or null.
    void whole(const Tile& tile, const Tile* next) {
        load_queries(tile);
        for (int64_t r = 0; r < tile.queries; r++) {
            sum_[r] = 0.0f;
        }
        const int64_t first = first_computed(tile), last = tile.last_position / SPLIT;
        const bool only = first == last && tile.shared_splits == 0;  // nothing to join
        join_shared(tile);
        for (int64_t split = first; split <= last; split++) {
            if (split < last) {
                expect(tile, split + 1);
            } else if (next != nullptr) {
                expect(*next, first_computed(*next));
            }
            compute(tile, split);
            if (only) {
                break;
            }
            for (int64_t r = 0; r < tile.queries; r++) {
                join(
                    part_ + r * width_, part_peak_[r], part_sum_[r], joined_ + r * width_, peak_[r], sum_[r],
                    p_.head_dim
                );
            }
        }
        for (int64_t r = 0; r < tile.queries; r++) {
            if (only) {
                divide(part_ + r * width_, part_sum_[r], out_row(tile, r), p_.head_dim);
            } else {
                divide(joined_ + r * width_, sum_[r], out_row(tile, r), p_.head_dim);
            }
        }
    }

    bool sees(const Tile& tile, int64_t split) const {
        return split <= tile.last_position / SPLIT && split >= first_seen(p_, tile.first_position) / SPLIT;
    }

    // One split of a tile, to `partial`; most likely this thread computes split `next_split` of `next` after it.
    void one(const Tile& tile, int64_t split, const Tile& next, int64_t next_split) {
        if (split < tile.shared_splits) {
            for (int64_t r = 0; r < tile.queries; r++) {
                const float* from = shared_part(p_, tile.sequence, head(tile, r), split);
                std::memcpy(partial(p_, tile.first_row, head(tile, r), split), from, part_bytes());
            }
            return;
        }
        const bool seen = sees(tile, split);
        if (seen) {
            if (sees(next, next_split)) {
                expect(next, next_split);
            }
            load_queries(tile);
            compute(tile, split);
        }
        for (int64_t r = 0; r < tile.queries; r++) {
            float* to = partial(p_, tile.first_row + r / tile.group, head(tile, r), split);
            if (seen) {
                store_part(r, to);
            } else {
                to[0] = to[1] = 0.0f;
            }
        }
    }

    // Rows of several sequences over one split that all of them see, to `shared_partial`; `next` as above.
    void shared(const PagedSharedPart& part, int64_t kv_head, const PagedSharedPart& next, int64_t next_head) {
        const Tile tile = shared_tile(part, kv_head);
        expect(shared_tile(next, next_head), next.split);
        for (int64_t r = 0; r < tile.queries; r++) {
            load_query(r, p_.query_start[member(part, tile, r)], head(tile, r));
        }
        compute(tile, part.split);
        for (int64_t r = 0; r < tile.queries; r++) {
            store_part(r, shared_part(p_, member(part, tile, r), head(tile, r), part.split));
        }
    }

    static float* partial(const PagedAttention& p, int64_t row, int64_t head, int64_t split) {
        return p.partial + ((row * p.num_heads + head) * p.num_splits + split) * (p.head_dim + 2);
    }

    static float* shared_part(const PagedAttention& p, int64_t sequence, int64_t head, int64_t split) {
        return p.shared_partial + ((sequence * p.num_heads + head) * p.most_shared + split) * (p.head_dim + 2);
    }

    // Adds a split to what the splits before it gave. A sum of 0 means that nothing was seen.
    static PAGED_INLINE void join(
        const float* part, float part_peak, float part_sum, float* joined, float& peak, float& sum, int64_t size
    ) {
        if (part_sum == 0.0f) {
            return;
        }
        if (sum == 0.0f) {
            std::memcpy(joined, part, static_cast<size_t>(size) * 4);
            peak = part_peak;
            sum = part_sum;
            return;
        }
        const float highest = peak > part_peak ? peak : part_peak;
        const F16 kept = exp(set1(peak - highest)), added = exp(set1(part_peak - highest));
        for_lanes(size, [&](int64_t i, auto n) {
            store_some(joined + i, fma(load_some(part + i, n), added, load_some(joined + i, n) * kept), n);
        });
        float factors[2][16];
        store(factors[0], kept);
        store(factors[1], added);
        sum = sum * factors[0][0] + part_sum * factors[1][0];
        peak = highest;
    }

    static PAGED_INLINE void divide(const float* joined, float sum, T* out, int64_t size) {
        const F16 factor = set1(1.0f / sum);
        for_lanes(size, [&](int64_t i, auto n) { store_some(out + i, load_some(joined + i, n) * factor, n); });
    }

private:
    static int64_t whole_passes(int64_t queries) {
        return queries <= PASS_ROWS / 2 ? queries : round_up(queries, PASS_ROWS);
    }

    // The first split that `whole` computes itself.
    int64_t first_computed(const Tile& tile) const {
        return most(tile.shared_splits, first_seen(p_, tile.first_position) / SPLIT);
    }

    // The parts that are there already, as the beginning of what is joined.
    void join_shared(const Tile& tile) {
        for (int64_t split = 0; split < tile.shared_splits; split++) {
            for (int64_t r = 0; r < tile.queries; r++) {
                const float* part = shared_part(p_, tile.sequence, head(tile, r), split);
                join(part + 2, part[0], part[1], joined_ + r * width_, peak_[r], sum_[r], p_.head_dim);
            }
        }
    }

    // The members' rows stand behind the split; their own positions do not matter.
    Tile shared_tile(const PagedSharedPart& part, int64_t kv_head) const {
        const int64_t group = p_.num_heads / p_.num_kv_heads, position = (part.split + 1) * SPLIT - 1;
        const int32_t* table = p_.block_table + part.sequence * p_.table_stride;
        return {kv_head, group, part.count * group, 0, position, position, table, part.sequence, 0};
    }

    int64_t member(const PagedSharedPart& part, const Tile& tile, int64_t query) const {
        return p_.members[part.first + query / tile.group];
    }

    size_t part_bytes() const { return static_cast<size_t>(p_.head_dim + 2) * 4; }

    // Peak, sum and, unless that is 0, the weighted values of a row's part.
    void store_part(int64_t r, float* to) const {
        to[0] = part_peak_[r];
        to[1] = part_sum_[r];
        if (to[1] != 0.0f) {
            std::memcpy(to + 2, part_ + r * width_, static_cast<size_t>(p_.head_dim) * 4);
        }
    }

    int64_t head(const Tile& tile, int64_t query) const { return tile.kv_head * tile.group + query % tile.group; }

    T* out_row(const Tile& tile, int64_t query) const {
        const int64_t row = tile.first_row + query / tile.group;
        return static_cast<T*>(p_.out) + row * p_.out_stride + head(tile, query) * p_.head_dim;
    }

    void load_queries(const Tile& tile) {
        for (int64_t r = 0; r < tile.queries; r++) {
            load_query(r, tile.first_row + r / tile.group, head(tile, r));
        }
    }

    void load_query(int64_t r, int64_t row, int64_t head) {
        const T* from = static_cast<const T*>(p_.q) + row * p_.q_stride + head * p_.head_dim;
        X* to = q_ + r * depth_;
        for_lanes(p_.head_dim, [&](int64_t i, auto n) { store_some(to + i, load_some(from + i, n), n); });
        std::memset(to + p_.head_dim, 0, static_cast<size_t>(depth_ - p_.head_dim) * sizeof(X));
    }

    // Parts, peaks and sums of one split; few rows at a time, whose scores stay in the first cache.
    void compute(const Tile& tile, int64_t split) {
        const Span span = span_of(p_, tile, split);
        gather(tile, span);
        const int64_t padded = span.padded();
        for (int64_t first = 0; first < tile.queries; first += ATTEND_ROWS) {
            const int64_t queries = least(ATTEND_ROWS, tile.queries - first);
            // More rows than there are queries are cheaper than a pass of another shape; nobody looks at theirs.
            const int64_t rows = whole_passes(queries);
            product(q_ + first * depth_, depth_, rows, keys_, 16 * depth_, padded / 16, depth_, scores_, SCORES_STRIDE);
            for (int64_t r = 0; r < queries; r++) {
                weigh(tile, span, first + r, scores_ + r * SCORES_STRIDE, weights_ + r * WEIGHTS_STRIDE);
            }
            product(
                weights_, WEIGHTS_STRIDE, rows, values_, 16 * padded, width_ / 16, padded, part_ + first * width_,
                width_
            );
        }
    }

    void product(
        const X* x, int64_t stride, int64_t rows, const X* packed, int64_t block_size, int64_t blocks, int64_t depth,
        float* out, int64_t out_stride
    ) {
        const X* all[SPLIT / 16];
        for (int64_t done = 0; done < blocks;) {
            const int64_t count = least(blocks - done, SPLIT / 16);
            for (int64_t b = 0; b < count; b++) {
                all[b] = packed + (done + b) * block_size;
            }
            Nothing nothing;
            multiply_(x, stride, rows, all, static_cast<int>(count), depth, out + 16 * done, out_stride, nothing);
            done += count;
        }
    }

    void gather(const Tile& tile, const Span& span) {
        const T *key = static_cast<const T*>(p_.key), *value = static_cast<const T*>(p_.value);
        const int64_t padded = span.padded(), tokens = span.tokens();
        Cells cells(p_, tile, span.begin);
        Cells ahead(p_, ahead_tile_, ahead_.begin);
        int64_t ahead_left = ahead_.tokens();
        ahead_.end = ahead_.begin;
        for (int64_t t = 0; t < padded; t += TILE) {
            for (int64_t i = least(TILE, ahead_left); i > 0; i--) {
                fetch(ahead.next());
                ahead_left--;
            }
            const T *keys[TILE], *values[TILE];
            for (int64_t i = 0; i < TILE; i++) {
                const bool real = t + i < tokens;
                const int64_t at = real ? cells.next() : 0;
                keys[i] = real ? key + at : nullptr;
                values[i] = real ? value + at : nullptr;
            }
            pack_keys(keys, p_.head_dim, depth_, keys_ + t * depth_);
            for (int64_t i = 0; i < TILE; i += 2) {
                pack_value_pair(values[i], values[i + 1], p_.head_dim, padded, t + i, values_);
            }
        }
    }

    PAGED_INLINE void fetch(int64_t at) const {
        const int64_t bytes = p_.head_dim * static_cast<int64_t>(sizeof(T));
        for (int64_t line = 0; line < bytes; line += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(static_cast<const T*>(p_.key) + at) + line, 0, 2);
            __builtin_prefetch(reinterpret_cast<const char*>(static_cast<const T*>(p_.value) + at) + line, 0, 2);
        }
    }

    // Scores of one query to weights; a token is seen from `low` up to below `high`, counted within the span.
    void weigh(const Tile& tile, const Span& span, int64_t query, float* scores, X* weights) {
        const int64_t position = tile.first_position + query / tile.group, padded = span.padded();
        const int64_t low = most(0, first_seen(p_, position) - span.begin);
        const int64_t high = least(span.end, position + 1) - span.begin;
        if (high <= low) {
            std::memset(weights, 0, static_cast<size_t>(padded) * sizeof(X));
            part_peak_[query] = part_sum_[query] = 0.0f;
            return;
        }
        hide(scores, padded, low, high);
        // Two tiles at a time, each to its own lanes: spans begin at pairs of tiles whatever the schedule.
        F16 highest[2] = {set1(-INFINITY), set1(-INFINITY)};
        for (int64_t t = 0; t < padded; t += 32) {
            highest[0] = max(highest[0], load(scores + t));
            highest[1] = max(highest[1], load(scores + t + 16));
        }
        const F16 scale = set1(p_.scale);
        const float peak = max_lanes(max(highest[0], highest[1])) * p_.scale;
        const F16 below = set1(-peak);
        F16 sums[2] = {zero(), zero()};
        for (int64_t t = 0; t < padded; t += 32) {
            const F16 first = exp_for<T>(fma(load(scores + t), scale, below));
            const F16 second = exp_for<T>(fma(load(scores + t + 16), scale, below));
            store(weights + t, first);
            store(weights + t + 16, second);
            sums[0] = sums[0] + first;
            sums[1] = sums[1] + second;
        }
        part_peak_[query] = peak;
        part_sum_[query] = sum_lanes(sums[0] + sums[1]);
    }

    // Tokens outside [low, high) must not count: their scores become -inf.
    static void hide(float* scores, int64_t padded, int64_t low, int64_t high) {
        for (int64_t t = 0; t < low; t++) {
            scores[t] = -INFINITY;
        }
        for (int64_t t = high; t < padded; t++) {
            scores[t] = -INFINITY;
        }
    }

    const PagedAttention& p_;
    Multiplier multiply_;
    Tile ahead_tile_{};
    Span ahead_{0, 0};
    int64_t depth_, width_;
    X *q_, *keys_, *values_, *weights_;
    float *scores_, *part_, *part_peak_, *part_sum_, *joined_, *peak_, *sum_;
};

// ---- the kernels

int64_t items(const PagedAttention& p) {
    return p.num_tiles * p.num_kv_heads * (p.partial == nullptr ? 1 : p.num_splits);
}

int64_t grain(const PagedAttention&) { return 1; }

Tile item_tile(const PagedAttention& p, int64_t item) {
    const int64_t unit = p.partial == nullptr ? item : item / p.num_splits;
    Tile tile = tile_at(p, unit / p.num_kv_heads);
    tile.kv_head = unit % p.num_kv_heads;
    return tile;
}

template <class T>
void run_items(const PagedAttention& p, int64_t first, int64_t last, void* scratch) {
    Attend<T> attend(p, scratch);
    Tile tile = item_tile(p, first);
    for (int64_t item = first; item < last; item++) {
        if (p.partial != nullptr) {
            const int64_t following = least(item + 1, items(p) - 1);
            attend.one(item_tile(p, item), item % p.num_splits, item_tile(p, following), following % p.num_splits);
            continue;
        }
        // The next item is most likely this thread's too, even beyond `last`.
        const bool more = item + 1 < p.num_tiles * p.num_kv_heads;
        const Tile next = more ? item_tile(p, item + 1) : tile;
        attend.whole(tile, more ? &next : nullptr);
        tile = next;
    }
}

void run(const PagedAttention& p, int64_t first, int64_t last, void* scratch) {
    if (p.dtype == PAGED_F32) {
        run_items<float>(p, first, last, scratch);
    } else {
        run_items<bf16>(p, first, last, scratch);
    }
}

int64_t shared_items(const PagedAttention& p) { return p.num_shared * p.num_kv_heads; }

template <class T>
void run_shared(const PagedAttention& p, int64_t first, int64_t last, void* scratch) {
    Attend<T> attend(p, scratch);
    for (int64_t item = first; item < last; item++) {
        const int64_t next = least(item + 1, shared_items(p) - 1);
        attend.shared(
            p.shared[item / p.num_kv_heads], item % p.num_kv_heads, p.shared[next / p.num_kv_heads],
            next % p.num_kv_heads
        );
    }
}

void shared_run(const PagedAttention& p, int64_t first, int64_t last, void* scratch) {
    if (p.dtype == PAGED_F32) {
        run_shared<float>(p, first, last, scratch);
    } else {
        run_shared<bf16>(p, first, last, scratch);
    }
}

// Joins the parts of rows; none where attention was computed whole.
int64_t join_items(const PagedAttention& p) { return p.partial == nullptr ? 0 : p.rows * p.num_heads; }

int64_t join_grain(const PagedAttention&) { return 4; }

template <class T>
void join_rows(const PagedAttention& p, int64_t first, int64_t last, void* scratch) {
    float* joined = Scratch(scratch).take<float>(p.head_dim);
    for (int64_t item = first; item < last; item++) {
        const int64_t row = item / p.num_heads, head = item % p.num_heads;
        float peak = 0.0f, sum = 0.0f;
        for (int64_t split = 0; split < p.num_splits; split++) {
            const float* part = Attend<T>::partial(p, row, head, split);
            Attend<T>::join(part + 2, part[0], part[1], joined, peak, sum, p.head_dim);
        }
        Attend<T>::divide(joined, sum, static_cast<T*>(p.out) + row * p.out_stride + head * p.head_dim, p.head_dim);
    }
}

void join_run(const PagedAttention& p, int64_t first, int64_t last, void* scratch) {
    if (p.dtype == PAGED_F32) {
        join_rows<float>(p, first, last, scratch);
    } else {
        join_rows<bf16>(p, first, last, scratch);
    }
}

}  // namespace

const PagedKernel ATTENTION = kernel<PagedAttention, items, grain, run>();
const PagedKernel ATTENTION_SHARED = kernel<PagedAttention, shared_items, grain, shared_run>();
const PagedKernel ATTENTION_JOIN = kernel<PagedAttention, join_items, join_grain, join_run>();

}  // namespace paged::PAGED_VARIANT
