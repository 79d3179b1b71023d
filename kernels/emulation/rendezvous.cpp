// Where emulated threads meet: barriers of a block, collectives of a warp, asynchronous copies. Compiled without
// sanitizers; words are moved one by one, since sanitizers intercept memcpy.
#include <cstring>

#include "state.hpp"

namespace emulation {

void complete(Barrier& barrier) {
    barrier.result[barrier.generation & 1] = barrier.votes;
    barrier.votes = barrier.arrived = 0;
    barrier.generation++;
    barrier.site = {};
    wake(&barrier);
}

void sync_block(Site site) {
    Barrier& barrier = block->barrier;
    char* order = &barrier.order[barrier.generation & 1];
    if (fiber->context.linear == 0)
        counters().barriers++;
    if (barrier.site.file && barrier.site.line != site.line) {
        fail("divergent barrier: %s:%d and %s:%d", barrier.site.file, barrier.site.line, site.file, site.line);
    }
    barrier.site = site;
    release(order);
    if (++barrier.arrived == block->alive) {
        complete(barrier);
    } else {
        wait_for(&barrier, site);
    }
    acquire(order);
}

int vote_block(bool predicate, Vote vote, Site site) {
    Barrier& barrier = block->barrier;
    const int generation = barrier.generation, voters = block->alive;
    barrier.votes += predicate;
    sync_block(site);
    const int votes = barrier.result[generation & 1];
    switch (vote) {
        case Vote::kCount:
            return votes;
        case Vote::kAll:
            return votes == voters;
        case Vote::kAny:
            return votes != 0;
    }
    return 0;
}

namespace {

Meeting& meeting_of(Warp& warp, unsigned mask) {
    for (Meeting& meeting : warp.meetings) {
        if (meeting.arrived && meeting.mask == mask)
            return meeting;
    }
    // A mask keeps its meeting, so that it fills the two tables in turn and lanes may still read the last one.
    Meeting* free = nullptr;
    for (Meeting& meeting : warp.meetings) {
        if (meeting.mask == mask && !meeting.arrived)
            return meeting;
        if (!meeting.arrived && !free)
            free = &meeting;
    }
    if (!free)
        fail("more than %d groups of a warp's lanes meet at once", kGroups);
    free->mask = mask;
    return *free;
}

void check(const Meeting& meeting, const Warp& warp, unsigned mask, Collective kind, Site site) {
    const unsigned lane = fiber->context.lane;
    if (!(mask >> lane & 1))
        fail("lane %u is not in its own mask %08x (%s:%d)", lane, mask, site.file, site.line);
    if (mask & ~warp.alive) {
        fail("mask %08x names lanes that have ended: %08x (%s:%d)", mask, mask & ~warp.alive, site.file, site.line);
    }
    if (meeting.arrived && (meeting.kind != kind || meeting.site.line != site.line)) {
        fail("divergent collective: %s:%d and %s:%d", meeting.site.file, meeting.site.line, site.file, site.line);
    }
}

}  // namespace

const uint32_t* exchange(
    unsigned mask, const uint32_t* in, int words, Collective kind, Site site, void (*finish)(uint32_t*)
) {
    Warp& warp = block->warps[fiber->context.warp];
    Meeting& meeting = meeting_of(warp, mask);
    check(meeting, warp, mask, kind, site);
    counters().collectives++;
    const int parity = meeting.generation & 1;
    const unsigned lane = fiber->context.lane;
    auto* mine = static_cast<volatile uint32_t*>(meeting.table[parity]) + lane * kWords;
    for (int i = 0; i < words; i++)
        mine[i] = in[i];
    meeting.kind = kind;
    meeting.site = site;
    meeting.arrived |= 1u << lane;
    // Only __syncwarp orders memory; a shuffle does not.
    if (kind == kSync)
        release(&meeting.order[parity]);
    if (meeting.arrived == mask) {
        if (finish)
            finish(meeting.table[parity]);
        meeting.arrived = 0;
        meeting.generation++;
        wake(&meeting);
    } else {
        wait_for(&meeting, site);
    }
    if (kind == kSync)
        acquire(&meeting.order[parity]);
    return meeting.table[parity];
}

void sync_warp(unsigned mask, Site site) { exchange(mask, nullptr, 0, kSync, site); }

void copy_async(void* destination, const void* source, int bytes, int valid) {
    const auto addresses = reinterpret_cast<uintptr_t>(destination) | (valid ? reinterpret_cast<uintptr_t>(source) : 0);
    if (addresses & static_cast<uintptr_t>(bytes - 1))
        fail("cp.async of %d bytes is misaligned", bytes);
    fiber->open.push_back({destination, source, bytes, valid});
    spoil(fiber->open.back());
    counters().bytes_copied += static_cast<uint64_t>(valid);
}

void commit_copies() {
    fiber->groups.push_back(std::move(fiber->open));
    fiber->open.clear();
}

void wait_copies(int pending) {
    auto& groups = fiber->groups;
    while (static_cast<int>(groups.size()) > pending) {
        for (const Copy& copy : groups.front())
            apply(copy);
        groups.erase(groups.begin());
    }
}

void count_mma() { counters().mma++; }

void count_load_matrix(const uint32_t* table, int matrices) {
    for (int matrix = 0; matrix < matrices; matrix++) {
        uint64_t rows[8];
        unsigned in_bank[8] = {}, worst = 0;
        for (int row = 0; row < 8; row++) {
            std::memcpy(&rows[row], table + (8 * matrix + row) * kWords + 4, 8);
            bool is_again = false;
            for (int earlier = 0; earlier < row; earlier++)
                is_again |= rows[earlier] == rows[row];
            if (!is_again)
                worst = std::max(worst, ++in_bank[rows[row] >> 4 & 7]);
        }
        counters().bank_conflicts += worst - 1;
    }
    counters().matrices += static_cast<uint64_t>(matrices);
}

}  // namespace emulation
