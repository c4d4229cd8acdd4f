/* Read the events of a Chrome trace into columns, in one pass over their text.
 *
 * The scanner reads an event only if it is certain of every field that the event's role needs. For
 * any other event, it writes a row that contains only the offsets of the event's text, and the
 * decoder reads the event. If a part of an event is not needed, the scanner checks only its strings
 * and its pairs of brackets. It never writes outside the columns.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "json.h"

/* The fields of an event, in the order in which Kineto writes them. */
enum { PH, CAT, NAME, PID, TID, TS, DUR, ARGS, ID, HEADS };
#define HEAD(key) {(Place) #key, (Place) #key + sizeof #key - 1}

/* The text before the name in the event of a Python frame. */
#define MAX_OPENING 96
typedef struct {
    unsigned char text[MAX_OPENING];
    size_t length; /* 0 if the text is unknown */
} Opening;

/* The roles of categories. They must match those in chrome_events.py. */
enum { DROP, OP, CALL, DEVICE, FRAME, ARROW, OTHER, UNSURE, ROLES };

/* The columns of a row. They must match those in chrome_events.py. The columns from NUMBERS on
 * contain numbers. The first number is the correlation ID, or the ID of an arrow.
 */
enum {
    KNOWN, BEGIN, END, NAMED, THREAD, START, DURATION, CONFIG, ARGS_BEGIN, ARGS_END, NUMBERS
};

#define FORM 4 /* version of this module's interface; it must match FORM in __init__.py */
#define MAX_KEYS 16                        /* maximum number of keys to read in args */
#define MAX_TEXTS (1 << 20)                /* maximum number of distinct texts in the table */
#define MAX_ARENA (256 << 20)              /* maximum size of these texts, in bytes */
#define MAX_DURATION (INT64_C(1000) << 43) /* in nanoseconds */
#define MAX_ARGUMENT_BYTES (4 << 20)       /* maximum size of the texts of op arguments, in bytes */
#define ARGUMENTS 253 /* kinds of texts; smaller kinds are indices of categories */
#define THREADS 254
#define CONFIGS 255
#define GIVEN 6

typedef struct {
    uint64_t hash;
    int64_t number; /* -1 if the bucket is unused */
} Bucket;

typedef struct {
    PyObject ob_base;
    unsigned char *arena; /* the texts, one after the other */
    size_t used, room;
    size_t argument_bytes; /* size of the texts of the kind ARGUMENTS */
    size_t *ends; /* end of each text, by its number */
    int64_t texts, texts_room;
    Bucket *buckets;
    size_t mask;
    int64_t latest[CONFIGS + 1]; /* number of the last text that was found for each kind */
    PyObject *given[GIVEN]; /* the objects that own the texts of the slices below */
    Slice categories[ARGUMENTS], keys[MAX_KEYS], op_keys[MAX_KEYS], module;
    Place roles;
    int category_count, numbers, key_count, op_key_count;
    Opening frame;
    Leads leads, leads_of_args[DEVICE + 1]; /* leads of events, and leads of args for each role */
} Scanner;

/* --- values ----------------------------------------------------------------------------------- */

/* Parse an integer of up to 18 digits. Return 0 if the text is not such an integer. */
static int whole(Slice text, int64_t *number) {
    int negative = text.begin < text.end && *text.begin == '-';
    Place at = text.begin + negative;
    if (text.end - at < 1 || text.end - at > 18)
        return 0;
    int64_t value = 0;
    for (; at < text.end; at++) {
        if (*at < '0' || *at > '9')
            return 0;
        value = value * 10 + (*at - '0');
    }
    *number = negative ? -value : value;
    return 1;
}

/* Convert microseconds >= 0 with up to three decimals to nanoseconds. Return 0 if the text is not
 * such a number.
 */
static int moment(Slice text, int64_t *number) {
    Place at = text.begin;
    int64_t value = 0;
    if (!at)
        return 0;
    for (; is_digit(at, text.end); at++) {
        if (at - text.begin >= 15)
            return 0;
        value = value * 10 + (*at - '0');
    }
    if (at == text.begin)
        return 0;
    int decimals = 0;
    if (at < text.end && *at == '.')
        for (at++; is_digit(at, text.end) && decimals < 3; at++, decimals++)
            value = value * 10 + (*at - '0');
    if (at != text.end)
        return 0;
    for (; decimals < 3; decimals++)
        value *= 10;
    *number = value;
    return 1;
}

/* --- table of texts --------------------------------------------------------------------------- */

static inline uint64_t load(Place at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

/* Return a hash of the bytes at `at` and of the earlier `hash`. */
static inline uint64_t hash_of(uint64_t hash, Place at, size_t length) {
    hash = (hash ^ length) * UINT64_C(0x9E3779B97F4A7C15);
    for (; length >= 8; at += 8, length -= 8) {
        hash = (hash ^ load(at)) * UINT64_C(0xD6E8FEB86659FD93);
        hash ^= hash >> 32;
    }
    uint64_t rest = 0;
    for (size_t i = 0; i < length; i++)
        rest = rest << 8 | at[i];
    hash = (hash ^ rest) * UINT64_C(0xD6E8FEB86659FD93);
    return hash ^ hash >> 32;
}

static int grow(Scanner *self, size_t bytes) {
    if (self->used + bytes > self->room) {
        size_t room = 2 * (self->used + bytes);
        unsigned char *arena = PyMem_Realloc(self->arena, room);
        if (!arena)
            return 0;
        self->arena = arena, self->room = room;
    }
    if (self->texts == self->texts_room) {
        int64_t room = 2 * self->texts_room + 64;
        size_t *ends = PyMem_Realloc(self->ends, (size_t)room * sizeof *ends);
        if (!ends)
            return 0;
        self->ends = ends, self->texts_room = room;
    }
    if ((size_t)self->texts * 2 >= self->mask) {
        size_t mask = 4 * (self->mask + 1) - 1;
        Bucket *buckets = PyMem_Malloc((mask + 1) * sizeof *buckets);
        if (!buckets)
            return 0;
        for (size_t i = 0; i <= mask; i++)
            buckets[i].number = -1;
        for (size_t i = 0; self->buckets && i <= self->mask; i++)
            if (self->buckets[i].number >= 0) {
                size_t place = self->buckets[i].hash & mask;
                while (buckets[place].number >= 0)
                    place = (place + 1) & mask;
                buckets[place] = self->buckets[i];
            }
        PyMem_Free(self->buckets);
        self->buckets = buckets, self->mask = mask;
    }
    return 1;
}

/* Return whether a text has this kind and consists of these parts, with `length` bytes in total. */
static int is_text(const Scanner *self, int64_t number, int kind, const Slice *parts, int count,
                   size_t length) {
    size_t begin = number ? self->ends[number - 1] : 0;
    Place at = self->arena + begin;
    if (self->ends[number] - begin != length || *at++ != kind)
        return 0;
    for (int i = 0; i < count; i++) {
        size_t part = parts[i].end - parts[i].begin;
        if ((i && *at++) || (part && memcmp(at, parts[i].begin, part)))
            return 0;
        at += part;
    }
    return 1;
}

/* Return the number of the text that has this kind and consists of these parts. A new text gets the
 * next number. Return -1 if the table is full, and -2 if there is not enough memory.
 */
static int64_t number_of(Scanner *self, int kind, const Slice *parts, int count) {
    size_t length = 1;
    uint64_t hash = (uint64_t)kind;
    for (int i = 0; i < count; i++)
        length += (size_t)(parts[i].end - parts[i].begin) + (i > 0);
    int64_t number = self->latest[kind];
    if (number < self->texts && is_text(self, number, kind, parts, count, length))
        return number;
    for (int i = 0; i < count; i++)
        hash = hash_of(hash, parts[i].begin, parts[i].end - parts[i].begin);
    if (!grow(self, length))
        return -2;
    size_t place = hash & self->mask;
    for (; (number = self->buckets[place].number) >= 0; place = (place + 1) & self->mask)
        if (self->buckets[place].hash == hash &&
            is_text(self, number, kind, parts, count, length))
            return self->latest[kind] = number;
    if (length > MAX_ARENA - self->used || self->texts >= MAX_TEXTS)
        return -1;
    if (kind == ARGUMENTS && (self->argument_bytes += length) > MAX_ARGUMENT_BYTES) {
        self->argument_bytes -= length;
        return -1;
    }
    unsigned char *at = self->arena + self->used;
    *at++ = (unsigned char)kind;
    for (int i = 0; i < count; i++) {
        size_t part = parts[i].end - parts[i].begin;
        if (i)
            *at++ = 0;
        if (part)
            memcpy(at, parts[i].begin, part);
        at += part;
    }
    self->buckets[place] = (Bucket){hash, self->texts};
    self->used += length;
    self->ends[self->texts] = self->used;
    return self->latest[kind] = self->texts++;
}

/* --- events ----------------------------------------------------------------------------------- */

/* Read the numbers in the args of a kernel or an API call into a row. Return 0 if the args do not
 * have the expected form.
 */
static int take_args(Scanner *self, Slice args, int role, int64_t *row, int *failed) {
    Slice values[MAX_KEYS];
    Text text = {.stop = args.end, .unread = -1, .asked = -1};
    Leads *leads = &self->leads_of_args[role];
    if (!args.begin || *args.begin != '{')
        return 0;
    if (!skip_members(&text, args.begin, 1, self->keys, self->key_count, values, leads) || text.odd)
        return 0;
    int numbers = role == DEVICE ? self->numbers : 1;
    for (int i = 0; i < numbers; i++) {
        row[NUMBERS + i] = -1;
        if (values[i].begin && !whole(values[i], &row[NUMBERS + i]))
            return 0;
    }
    if (role != DEVICE)
        return 1;
    row[CONFIG] = number_of(self, CONFIGS, values + self->numbers, self->key_count - self->numbers);
    *failed |= row[CONFIG] == -2;
    return row[CONFIG] >= 0;
}

/* Write the fields of an event to a row. Return 0 if the decoder must read the event. */
static int take(Scanner *self, const Slice *head, int category, int role, int64_t *row,
                int *failed) {
    if (!moment(head[TS], &row[START]))
        return 0;
    if (role != DEVICE) {
        row[THREAD] = number_of(self, THREADS, head + PID, 2);
        *failed |= row[THREAD] == -2;
        if (row[THREAD] < 0)
            return 0;
    }
    if (role == ARROW) {
        if (!is_string(head[PH]) || head[PH].end - head[PH].begin != 3 || !head[ID].begin)
            return 0;
        row[NAMED] = head[PH].begin[1] == 's';
        return (row[NAMED] || head[PH].begin[1] == 'f') && whole(head[ID], &row[NUMBERS]) &&
               row[NUMBERS] >= 0;
    }
    if (!is_string(head[NAME]))
        return 0;
    row[NAMED] = number_of(self, category, head + NAME, 1);
    *failed |= row[NAMED] == -2;
    if (row[NAMED] < 0)
        return 0;
    if (role != CALL && (!moment(head[DUR], &row[DURATION]) || row[DURATION] >= MAX_DURATION))
        return 0;
    return (role != CALL && role != DEVICE) || take_args(self, head[ARGS], role, row, failed);
}

/* Return whether a Python frame is not the call of an nn.Module. Such a frame is not read. */
static inline int is_foreign(const Scanner *self, Slice name) {
    Slice module = self->module;
    size_t length = module.end - module.begin;
    return is_string(name) && ((size_t)(name.end - name.begin) <= length ||
                               memcmp(name.begin + 1, module.begin, length));
}

/* Return the role of an event, and set the number of its category. */
static int role_of(const Scanner *self, const Slice *head, int *category) {
    *category = key_number(self->categories, self->category_count, head[CAT]);
    int role = *category < 0 ? OTHER : self->roles[*category];
    return role == FRAME && is_foreign(self, head[NAME]) ? DROP : role;
}

static int is_needless(const void *owner, const Slice *head) {
    int category;
    return role_of(owner, head, &category) == DROP;
}

/* Store the text before the name of a frame, if the name comes after the category. */
static void remember(Opening *frame, Place begin, const Slice *head) {
    size_t length = head[NAME].begin - begin;
    if (head[NAME].begin > head[CAT].begin && length <= MAX_OPENING) {
        memcpy(frame->text, begin, length);
        frame->length = length;
    }
}

/* Return the end of the event at `at` if it starts like the last frame and need not be read.
 * Otherwise, return NULL.
 */
static Place skip_frame(const Scanner *self, Place at, Place stop) {
    const Opening *frame = &self->frame;
    if (!frame->length || stop - at <= MAX_OPENING || memcmp(at, frame->text, frame->length))
        return NULL;
    Slice rest = {at + frame->length, stop}; /* starts with the name */
    return is_foreign(self, rest) ? skip_pairs(rest.begin, stop, 1) : NULL;
}

/* Return the end of an event, and set *next to the start of the next event or to the end of the
 * text. Return NULL if the event is incomplete or if it is the last event of the array.
 */
static Place event_end(Place end, Place stop, Place *next) {
    *next = end ? skip_space(end, stop) : NULL;
    if (!end || *next == stop)
        return end;
    if (**next != ',')
        return NULL;
    *next = skip_space(*next + 1, stop);
    return *next < stop && **next == '{' ? end : NULL;
}

static PyObject *scan(PyObject *object, PyObject *arguments) {
    Scanner *self = (Scanner *)object;
    static const Slice keys[HEADS] = {HEAD(ph), HEAD(cat), HEAD(name), HEAD(pid), HEAD(tid),
                                      HEAD(ts), HEAD(dur), HEAD(args), HEAD(id)};
    Py_buffer source, target;
    Py_ssize_t first, last, counts[ROLES] = {0};
    if (!PyArg_ParseTuple(arguments, "y*nnw*", &source, &first, &last, &target))
        return NULL;
    last = last < 0 ? 0 : last > source.len ? source.len : last;
    first = first < 0 ? 0 : first > last ? last : first;
    int width = NUMBERS + self->numbers, failed = 0;
    Py_ssize_t capacity = target.len / (Py_ssize_t)(8 * ROLES * width);
    int full = !capacity;
    Place begin = source.buf, stop = begin + last;
    Place at = begin + first, used = at;
    while (at < stop && *at == '{' && !full) {
        int64_t row[NUMBERS + MAX_KEYS];
        Slice head[HEADS];
        Text text = {stop, ARGS, NAME, is_needless, self, 0};
        Place next, end = skip_frame(self, at, stop);
        int category = -1, role = DROP;
        if (!end) {
            end = skip_members(&text, at, 0, keys, HEADS, head, &self->leads);
            role = text.odd ? UNSURE : role_of(self, head, &category);
            if (role == DROP && self->roles[category] == FRAME)
                remember(&self->frame, at, head);
        }
        if (!(end = event_end(end, stop, &next)))
            break;
        if (role != DROP) {
            int columns = role == DEVICE ? width : NUMBERS + 1;
            memset(row, 0, 8 * columns);
            row[KNOWN] = role < OTHER && take(self, head, category, role, row, &failed);
            row[BEGIN] = at - begin, row[END] = end - begin;
            if (head[ARGS].begin)
                row[ARGS_BEGIN] = head[ARGS].begin - begin, row[ARGS_END] = head[ARGS].end - begin;
            if (failed)
                break;
            Py_ssize_t place = role * width * capacity + counts[role];
            for (int i = 0; i < columns; i++)
                memcpy((char *)target.buf + 8 * (place + i * capacity), &row[i], 8);
            full = counts[role] + 1 == capacity;
        }
        counts[role]++;
        used = next < stop ? next : end;
        at = next;
    }
    Py_ssize_t behind = used - begin;
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (failed)
        return PyErr_NoMemory();
    PyObject *told = PyTuple_New(ROLES);
    for (int i = 0; told && i < ROLES; i++) {
        PyObject *count = PyLong_FromSsize_t(counts[i]);
        if (!count || PyTuple_SetItem(told, i, count))
            Py_CLEAR(told);
    }
    return told ? Py_BuildValue("nN", behind, told) : NULL;
}

/* Read the args of ops. At first, a row contains the begin and the end of an op's args in the text.
 * The begin is replaced by the number of the text of the arguments, or by -1 if the decoder must
 * read the args. The end is replaced by the sequence number, or by -1 if there is none.
 */
static PyObject *arguments(PyObject *object, PyObject *given) {
    Scanner *self = (Scanner *)object;
    Py_buffer source, target;
    if (!PyArg_ParseTuple(given, "y*w*", &source, &target))
        return NULL;
    int failed = 0;
    int64_t *rows = target.buf;
    for (int64_t i = 0; i < target.len / 16 && !failed; i++) {
        int64_t *row = rows + 2 * i, begin = row[0], end = row[1];
        Slice values[MAX_KEYS];
        row[0] = row[1] = -1;
        if (begin < 0 || end > source.len || begin >= end)
            continue;
        Place at = (Place)source.buf + begin;
        Text text = {.stop = (Place)source.buf + end, .unread = -1, .asked = -1};
        if (*at != '{' || !skip_members(&text, at, 1, self->op_keys, self->op_key_count, values,
                                        &self->leads_of_args[OP]))
            continue;
        if (text.odd || (values[0].begin && !whole(values[0], &row[1])))
            continue;
        row[0] = number_of(self, ARGUMENTS, values + 1, self->op_key_count - 1);
        failed = row[0] == -2;
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *texts(PyObject *object, PyObject *arguments) {
    Scanner *self = (Scanner *)object;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(arguments, "n", &first))
        return NULL;
    PyObject *list = PyList_New(0);
    for (int64_t i = first < 0 ? 0 : first; list && i < self->texts; i++) {
        size_t begin = i ? self->ends[i - 1] : 0;
        PyObject *text = PyBytes_FromStringAndSize((char *)self->arena + begin,
                                                   (Py_ssize_t)(self->ends[i] - begin));
        if (!text || PyList_Append(list, text))
            Py_CLEAR(list);
        Py_XDECREF(text);
    }
    return list;
}

/* --- intervals -------------------------------------------------------------------------------- */

/* Find the parent of each interval, which is the last earlier interval of the thread that encloses
 * the start of the interval, or -1. The intervals must be sorted by thread and start. All intervals
 * between an interval and its parent have ended before the interval starts. All columns have 8
 * bytes per value.
 */
static PyObject *parents(PyObject *module, PyObject *arguments) {
    Py_buffer thread, start, stop, parent;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*", &thread, &start, &stop, &parent))
        return NULL;
    const int64_t *threads = thread.buf, *starts = start.buf, *stops = stop.buf;
    int64_t *found = parent.buf, count = parent.len / 8;
    int alike = thread.len == parent.len && start.len == parent.len && stop.len == parent.len;
    for (int64_t i = 0; alike && i < count; i++) {
        int64_t at = i && threads[i - 1] == threads[i] ? i - 1 : -1;
        while (at >= 0 && stops[at] <= starts[i])
            at = found[at];
        found[i] = at;
    }
    PyBuffer_Release(&thread);
    PyBuffer_Release(&start);
    PyBuffer_Release(&stop);
    PyBuffer_Release(&parent);
    if (alike)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "columns of unlike length");
    return NULL;
}

/* --- the type --------------------------------------------------------------------------------- */

/* Split a text at NULs and return the number of parts, or -1 if there are more than `most`. */
static int split(PyObject *bytes, Slice *parts, int most) {
    Place at = (Place)PyBytes_AsString(bytes), stop = at + PyBytes_Size(bytes);
    for (int count = 0; count < most; count++) {
        Place end = memchr(at, 0, stop - at);
        parts[count] = (Slice){at, end ? end : stop};
        if (!end)
            return count + 1;
        at = end + 1;
    }
    return -1;
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    PyObject *categories, *roles, *numbers, *parts, *op_keys, *module;
    (void)names;
    if (!PyArg_ParseTuple(arguments, "SSSSSS", &categories, &roles, &numbers, &parts, &op_keys,
                          &module))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Scanner *self = (Scanner *)alloc(type, 0); /* all fields are zero */
    if (!self)
        return NULL;
    PyObject *given[GIVEN] = {categories, roles, numbers, parts, op_keys, module};
    for (int i = 0; i < GIVEN; i++) {
        Py_INCREF(given[i]);
        self->given[i] = given[i];
    }
    self->roles = (Place)PyBytes_AsString(roles);
    self->category_count = split(categories, self->categories, ARGUMENTS);
    self->numbers = split(numbers, self->keys, MAX_KEYS - 1);
    int more =
        self->numbers > 0 ? split(parts, self->keys + self->numbers, MAX_KEYS - self->numbers) : -1;
    self->key_count = self->numbers + more;
    self->op_key_count = split(op_keys, self->op_keys, MAX_KEYS);
    split(module, &self->module, 1);
    if (more > 0 && self->op_key_count > 1 && self->category_count > 0 &&
        self->category_count == PyBytes_Size(roles))
        return (PyObject *)self;
    PyErr_SetString(PyExc_ValueError, "too many keys or categories, or not a role for each");
    Py_DECREF(self);
    return NULL;
}

static void dealloc(PyObject *object) {
    Scanner *self = (Scanner *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->arena);
    PyMem_Free(self->ends);
    PyMem_Free(self->buckets);
    for (int i = 0; i < GIVEN; i++)
        Py_XDECREF(self->given[i]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {{"scan", scan, METH_VARARGS, NULL},
                                {"arguments", arguments, METH_VARARGS, NULL},
                                {"texts", texts, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"profharness.traces._scanner.Scanner", sizeof(Scanner), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};

static int fill(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "Scanner", type) ||
                 PyModule_AddIntConstant(module, "FORM", FORM);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyMethodDef functions[] = {{"parents", parents, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_scanner", NULL, 0,   functions,
                                 module_slots,          NULL,       NULL, NULL};

PyMODINIT_FUNC PyInit__scanner(void) { return PyModuleDef_Init(&module_def); }
