// Elements from values, and a page that changes only where they do: focus, scroll positions, what is
// selected and what is open stay. Text becomes text alone: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "rect", "line", "circle", "path", "text", "title"]);

/** An element. Attributes that are null or false are left out; children may be nested lists. */
export function h(name, attributes, ...children) {
  const element = DRAWN.has(name)
    ? document.createElementNS(SVG, name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(key, value === true ? "" : String(value));
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
  return element;
}

/** Let what is inside `place` be `children`, and change no more than it takes. */
export function show(place, ...children) {
  const active = document.activeElement;
  const wanted = place.cloneNode(false);
  wanted.append(...children.flat(Infinity).filter((child) => child instanceof Node));
  morphChildren(place, wanted);
  // An element that was moved to another place has lost the focus.
  if (active !== document.activeElement && active?.isConnected) {
    active.focus({ preventScroll: true });
  }
}

function morph(old, wanted) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) {
      old.data = wanted.data;
    }
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!wanted.hasAttribute(name) && !isTheUsers(name)) {
      old.removeAttribute(name);
    }
  }
  for (const { name, value } of wanted.attributes) {
    if (old.getAttribute(name) !== value && !isTheUsers(name)) {
      old.setAttribute(name, value);
    }
  }
  morphChildren(old, wanted);
}

/** What the user may have changed on the page itself. */
function isTheUsers(attribute) {
  return attribute === "open" || attribute === "checked" || attribute === "selected";
}

function morphChildren(old, wanted) {
  const keyed = new Map();
  for (const child of old.childNodes) {
    if (keyOf(child) !== null && !keyed.has(keyOf(child))) {
      keyed.set(keyOf(child), child);
    }
  }
  let at = old.firstChild;
  for (const child of [...wanted.childNodes]) {
    const key = keyOf(child);
    const match = key === null ? at : keyed.get(key);
    keyed.delete(key); // another of the same name is one of its own
    if (match && isAlike(match, child)) {
      if (match === at) {
        at = at.nextSibling;
      } else {
        old.insertBefore(match, at);
      }
      morph(match, child);
    } else {
      old.insertBefore(child, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function isAlike(one, other) {
  return one.nodeName === other.nodeName && keyOf(one) === keyOf(other);
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}
