/* Decodes zstd frames whose blocks are Huffman codes without matches (RFC 8878), as _huffman_encode.c and most often zstd itself write
   them for numbers. It decodes up to six symbols at a step, twice as fast as zstd. What it does not know or finds damaged it leaves to
   zstd: it need not accept every frame, but must read what it accepts as zstd does, and no byte outside of it. */

#include "_kernel.h"

#define MAX_SYMBOLS 6 /* at a step */
#define LEAST_WINDOW ((17 - 10) << 3) /* of smaller ones blocks have to be smaller, too; zstd refuses larger ones than the other */
#define MOST_WINDOW ((27 - 10) << 3)

static unsigned highest_bit(uint32_t value)
{
    unsigned bit = 0;
    while (value >>= 1)
        bit++;
    return bit;
}

static uint64_t get_le(const uint8_t *from, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)from[i] << 8 * i;
    return value;
}

typedef struct {
    const uint8_t *start;
    size_t left; /* bits, read from the last one on */
} BitReader;

/* False if no bit marks the end. */
static int begin_bits(BitReader *reader, const uint8_t *start, size_t size)
{
    if (!size || !start[size - 1])
        return 0;
    *reader = (BitReader){start, 8 * (size - 1) + highest_bit(start[size - 1])};
    return 1;
}

/* The next bits, at most 16, and zeros behind the last one. */
static unsigned peek_bits(const BitReader *reader, unsigned count)
{
    if (!count)
        return 0;
    size_t top = (reader->left + 7) / 8, from = top > 8 ? top - 8 : 0, known = reader->left - 8 * from;
    uint64_t bits = top < 8 ? get_le(reader->start, (int)top) : load64((const char *)reader->start + from, 0);
    bits = known >= count ? bits >> (known - count) : bits << (count - known);
    return (unsigned)bits & ((1u << count) - 1);
}

/* The shares of FSE's states that each weight has; returns the bytes of their description, 0 if that is none. */
static size_t read_shares(const uint8_t *from, size_t size, unsigned *log, int shares[MAX_BITS + 2])
{
    uint8_t padded[16] = {0};
    memcpy(padded, from, size < 12 ? size : 12);
    size_t bit = 4;
    int w = 0, remaining, threshold;
    *log = (padded[0] & 15) + 5;
    if (*log > 6)
        return 0;
    memset(shares, 0, (MAX_BITS + 2) * sizeof *shares);
    threshold = 1 << *log;
    remaining = threshold + 1;
    for (unsigned bits = *log + 1; remaining > 1;) {
        if (w > MAX_BITS || bit > 8 * 12)
            return 0;
        unsigned next = (unsigned)(get_le(padded + bit / 8, 4) >> bit % 8);
        int most = 2 * threshold - 1 - remaining, share = (int)(next & (unsigned)(threshold - 1));
        if (share < most)
            bit += bits - 1;
        else {
            share = (int)(next & (unsigned)(2 * threshold - 1));
            if (share >= threshold)
                share -= most;
            bit += bits;
        }
        if (--share < 0)
            return 0; /* "less than one": zstd never writes that for weights */
        remaining -= share;
        shares[w++] = share;
        for (; remaining > 1 && remaining < threshold; threshold >>= 1)
            bits--;
        for (int zeros = share ? 0 : 3; zeros == 3; bit += 2) {
            if (bit > 8 * 12)
                return 0;
            zeros = (int)(get_le(padded + bit / 8, 4) >> bit % 8 & 3);
            w += zeros;
        }
    }
    size_t bytes = (bit + 7) / 8;
    return remaining == 1 && w <= MAX_BITS + 1 && bit <= 8 * 12 && bytes <= size ? bytes : 0;
}

typedef struct {
    uint8_t weight, bits;
    uint16_t next;
} State;

static void make_states(const int shares[MAX_BITS + 2], unsigned log, State states[64])
{
    unsigned count = 1u << log, at = 0;
    unsigned next[MAX_BITS + 2];
    for (int w = 0; w < MAX_BITS + 2; w++) {
        next[w] = (unsigned)shares[w];
        for (int i = 0; i < shares[w]; i++, at = (at + (count >> 1) + (count >> 3) + 3) & (count - 1))
            states[at].weight = (uint8_t)w;
    }
    for (unsigned s = 0; s < count; s++) {
        unsigned number = next[states[s].weight]++;
        states[s].bits = (uint8_t)(log - highest_bit(number));
        states[s].next = (uint16_t)((number << states[s].bits) - count);
    }
}

/* The weights of an FSE stream (4.2.1.2); returns how many, 0 if it is none. */
static size_t read_weights(const uint8_t *from, size_t size, uint8_t weights[256])
{
    int shares[MAX_BITS + 2];
    unsigned log;
    State states[64];
    BitReader reader;
    size_t described = read_shares(from, size, &log, shares), count = 0;
    if (!described || !begin_bits(&reader, from + described, size - described) || reader.left < 2 * log)
        return 0;
    make_states(shares, log, states);
    unsigned at[2];
    for (int i = 0; i < 2; i++, reader.left -= log)
        at[i] = peek_bits(&reader, log);
    for (;; count++) {
        if (count > 253)
            return 0;
        const State *state = &states[at[count & 1]];
        weights[count] = state->weight;
        if (state->bits > reader.left) { /* the other state has the last weight */
            weights[count + 1] = states[at[(count + 1) & 1]].weight;
            return count + 2;
        }
        at[count & 1] = state->next + peek_bits(&reader, state->bits);
        reader.left -= state->bits;
    }
}

/* Makes the code of a block; returns the bytes of its description, 0 if that is none. */
static size_t read_code(Frame *frame, const uint8_t *from, size_t size)
{
    uint8_t weights[256] = {0};
    size_t count, described;
    if (!size)
        return 0;
    if (from[0] < 128) {
        described = 1 + (size_t)from[0];
        count = described <= size ? read_weights(from + 1, described - 1, weights) : 0;
    } else {
        count = (size_t)from[0] - 127;
        described = 1 + (count + 1) / 2;
        for (size_t i = 0; described <= size && i < count; i++)
            weights[i] = i % 2 ? from[1 + i / 2] & 15 : from[1 + i / 2] >> 4;
    }
    uint32_t total = 0, rarest = 0;
    for (size_t i = 0; i < count; i++) {
        if (weights[i] > MAX_BITS)
            return 0;
        total += weights[i] ? 1u << (weights[i] - 1) : 0;
    }
    if (described > size || !total)
        return 0;
    unsigned longest = highest_bit(total) + 1;
    uint32_t rest = ((uint32_t)1 << longest) - total;
    if (longest > MAX_BITS || rest & (rest - 1))
        return 0;
    weights[count] = (uint8_t)(highest_bit(rest) + 1);
    size_t starts[MAX_BITS + 2] = {0};
    for (size_t symbol = 0; symbol <= count; symbol++)
        if (weights[symbol]) {
            rarest += weights[symbol] == 1;
            starts[weights[symbol] + 1] += (size_t)1 << (weights[symbol] - 1 + MAX_BITS - longest);
        }
    for (unsigned weight = 1; weight <= longest; weight++)
        starts[weight + 1] += starts[weight];
    for (size_t symbol = 0; symbol <= count; symbol++)
        if (weights[symbol]) {
            uint16_t *to = frame->symbols + starts[weights[symbol]], entry = (uint16_t)(symbol << 8 | (longest + 1 - weights[symbol]));
            size_t entries = (size_t)1 << (weights[symbol] - 1 + MAX_BITS - longest);
            starts[weights[symbol]] += entries;
            for (size_t i = 0; i < entries; i++)
                to[i] = entry;
        }
    return rarest >= 2 ? described : 0;
}

/* What 0, 1, 2, ... bits decode to: their first symbol, and then what the bits after it decode to. */
HOT_SHIFTS static void make_steps(Frame *frame)
{
    frame->steps[1] = 0;
    for (unsigned known = 1; known <= STEP_BITS; known++)
        for (size_t head = 0; head < (size_t)1 << known; head++) {
            uint16_t symbol = frame->symbols[head << (STEP_BITS - known)];
            unsigned bits = symbol & 255;
            uint64_t step = 0;
            if (bits <= known) {
                size_t rest = (size_t)1 << (known - bits);
                rest |= head & (rest - 1);
                while (frame->steps[rest] >> 56 == MAX_SYMBOLS)
                    rest >>= 1; /* a bit fewer, without the one that was the lowest */
                uint64_t more = frame->steps[rest];
                step = ((more & 0x0000FFFFFFFFFF00) << 8 | (symbol & 0xFF00)) + (more & 255) + bits + (((more >> 56) + 1) << 56);
            }
            frame->steps[((size_t)1 << known) + head] = step;
        }
}

typedef struct {
    uint64_t bits; /* the next ones at the top, then one that marks how many are used up */
    const uint8_t *start, *at;
    uint8_t *to, *end;
} Stream;

INLINE void take_steps(Stream *stream, const uint64_t *steps)
{
    uint64_t bits = stream->bits, step;
    uint8_t *to = stream->to;
    for (int i = 0; i < 5; i++) { /* 5 * 11 bits, after 7 of the last byte */
        step = steps[bits >> (64 - STEP_BITS)];
        bits <<= step & 63;
        uint64_t symbols = step >> 8;
        memcpy(to, &symbols, 8);
        to += step >> 56;
    }
    stream->to = to;
    unsigned used = (unsigned)TRAILING_ZEROS(bits);
    stream->at -= used >> 3;
    memcpy(&bits, stream->at, 8);
    stream->bits = (bits | 1) << (used & 7);
}

/* As often as `take_steps` can be called without passing an end of the stream. */
INLINE size_t rounds_of(const Stream *stream)
{
    size_t readable = (size_t)(stream->at - stream->start) / 7, space = (size_t)(stream->end - stream->to);
    size_t writable = space > 8 ? (space - 8) / (5 * MAX_SYMBOLS) : 0;
    return readable < writable ? readable : writable;
}

/* Decodes four streams at a time while no step can pass an end of any; then what is left of each, as sorted words leave more in some. */
HOT_SHIFTS static void decode_fast(Stream streams[STREAMS], const uint64_t *steps)
{
    Stream a = streams[0], b = streams[1], c = streams[2], d = streams[3];
    for (;;) {
        size_t rounds = SIZE_MAX;
        Stream *each[STREAMS] = {&a, &b, &c, &d};
        for (int s = 0; s < STREAMS; s++)
            rounds = rounds_of(each[s]) < rounds ? rounds_of(each[s]) : rounds;
        if (!rounds)
            break;
        for (; rounds > 0; rounds--) {
            take_steps(&a, steps);
            take_steps(&b, steps);
            take_steps(&c, steps);
            take_steps(&d, steps);
        }
    }
    streams[0] = a, streams[1] = b, streams[2] = c, streams[3] = d;
    for (int s = 0; s < STREAMS; s++) {
        Stream alone = streams[s];
        for (size_t rounds; (rounds = rounds_of(&alone)) > 0;)
            for (; rounds > 0; rounds--)
                take_steps(&alone, steps);
        streams[s] = alone;
    }
}

static int decode_rest(BitReader *reader, const uint16_t symbols[STEPS], uint8_t *to, const uint8_t *end)
{
    while (to < end) {
        uint16_t symbol = symbols[peek_bits(reader, MAX_BITS)];
        if ((symbol & 255u) > reader->left)
            return 0;
        reader->left -= symbol & 255u;
        *to++ = (uint8_t)(symbol >> 8);
    }
    return reader->left == 0;
}

static int decode_streams(const Frame *frame, const uint8_t *from, size_t size, uint8_t *into, size_t raw_size)
{
    size_t quarter = (raw_size + STREAMS - 1) / STREAMS, sizes[STREAMS];
    Stream streams[STREAMS];
    BitReader readers[STREAMS];
    int are_long = 1;
    if (size < 6 || raw_size < 3 * quarter)
        return 0;
    sizes[0] = get_le(from, 2), sizes[1] = get_le(from + 2, 2), sizes[2] = get_le(from + 4, 2);
    if (sizes[0] + sizes[1] + sizes[2] > size - 6)
        return 0;
    sizes[3] = size - 6 - sizes[0] - sizes[1] - sizes[2];
    from += 6;
    for (int s = 0; s < STREAMS; from += sizes[s], into += quarter, s++) {
        if (!begin_bits(&readers[s], from, sizes[s]))
            return 0;
        are_long &= sizes[s] >= 8;
        streams[s] = (Stream){0, from, from, into, s < 3 ? into + quarter : into + raw_size - 3 * quarter};
        if (are_long) {
            streams[s].at = from + sizes[s] - 8;
            memcpy(&streams[s].bits, streams[s].at, 8);
            streams[s].bits = (streams[s].bits | 1) << (8 * sizes[s] - readers[s].left);
        }
    }
    if (are_long) {
        decode_fast(streams, frame->steps + STEPS);
        for (int s = 0; s < STREAMS; s++)
            readers[s].left = 8 * (size_t)(streams[s].at - streams[s].start) + 64 - (size_t)TRAILING_ZEROS(streams[s].bits);
    }
    for (int s = 0; s < STREAMS; s++)
        if (!decode_rest(&readers[s], frame->symbols, streams[s].to, streams[s].end))
            return 0;
    return 1;
}

typedef struct {
    enum { RAW_BLOCK, RLE_BLOCK, COMPRESSED_BLOCK } type;
    int is_last, has_code;
    const uint8_t *content, *end; /* of a compressed block: its literals; its end */
    size_t size, raw_size;
} Block;

/* False for a block that is none, or has matches. */
static int read_block(const uint8_t *at, const uint8_t *end, Block *block)
{
    if (end - at < BLOCK_HEADER)
        return 0;
    uint64_t header = get_le(at, BLOCK_HEADER);
    size_t size = (size_t)(header >> 3);
    int type = header >> 1 & 3;
    at += BLOCK_HEADER;
    *block = (Block){type, header & 1, 0, at, at + (type == RLE_BLOCK ? 1 : size), size, size};
    if (type > COMPRESSED_BLOCK || !size || size > HUFFMAN_BLOCK || (size_t)(end - at) < (type == RLE_BLOCK ? 1 : size))
        return 0;
    if (type != COMPRESSED_BLOCK)
        return 1;
    int kind = at[0] & 3, form = at[0] >> 2 & 3, width = form == 3 ? 18 : form == 2 ? 14 : 10;
    size_t literals = (size_t)(4 + 2 * width + 7) / 8;
    if (kind < 2 || !form || size < literals)
        return 0;
    uint64_t sizes = get_le(at, (int)literals) >> 4, mask = ((uint64_t)1 << width) - 1;
    block->has_code = kind == 2;
    block->raw_size = sizes & mask;
    block->size = sizes >> width & mask;
    block->content = at + literals;
    /* Four streams of fewer bytes are what zstd refuses. */
    return block->raw_size >= 6 && block->raw_size <= HUFFMAN_BLOCK && literals + block->size + 1 == size && at[size - 1] == 0;
}

int begin_frame(Frame *frame, const uint8_t *stored, size_t stored_size, size_t raw_size)
{
    if (stored_size < 6 || get_le(stored, 4) != 0xFD2FB528)
        return 0;
    int form = stored[4], is_single = form >> 5 & 1, size_bytes = form >> 6 ? 1 << (form >> 6) : is_single;
    size_t header = 5 + (size_t)!is_single + (size_t)size_bytes, total = 0;
    if (form & 15 || !size_bytes || stored_size < header)
        return 0;
    if (!is_single && (stored[5] < LEAST_WINDOW || stored[5] > MOST_WINDOW))
        return 0;
    if (get_le(stored + header - size_bytes, size_bytes) + (size_bytes == 2 ? 256 : 0) != raw_size)
        return 0;
    frame->at = stored + header;
    frame->end = stored + stored_size;
    frame->has_code = 0;
    Block block = {.is_last = 0};
    for (const uint8_t *at = frame->at; !block.is_last; at = block.end) {
        if (!read_block(at, frame->end, &block) || block.raw_size > raw_size - total || (block.is_last && block.end != frame->end))
            return 0;
        if (is_single && block.type == COMPRESSED_BLOCK && (size_t)(block.end - at) - BLOCK_HEADER > raw_size)
            return 0; /* zstd's limit of a block is the frame's content then */
        total += block.raw_size;
    }
    return total == raw_size;
}

size_t decode_block(Frame *frame, uint8_t *into)
{
    Block block;
    size_t described = 0;
    if (!read_block(frame->at, frame->end, &block))
        return 0;
    frame->at = block.end;
    if (block.type == RAW_BLOCK)
        memcpy(into, block.content, block.raw_size);
    else if (block.type == RLE_BLOCK)
        memset(into, block.content[0], block.raw_size);
    else {
        if (block.has_code) {
            described = read_code(frame, block.content, block.size);
            frame->has_code = described > 0;
            if (described)
                make_steps(frame);
        }
        if (!frame->has_code || !decode_streams(frame, block.content + described, block.size - described, into, block.raw_size))
            return 0;
    }
    return block.raw_size;
}
