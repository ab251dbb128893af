// What is wrong with how a page looks: a list of sentences, empty for a page as it should be.
const faults = [];
const smallest = arguments[0]; // pixels of a letter
const root = document.documentElement;
const name = (element) => {
  const words = (element.alt || element.textContent).trim().replace(/\s+/g, " ").slice(0, 40);
  return `<${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> "${words}"`;
};
const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });

if (root.scrollWidth > window.innerWidth) faults.push(`the page is ${root.scrollWidth} wide, the window ${window.innerWidth}`);

for (const image of document.images) {
  if (!image.complete || image.naturalWidth === 0) faults.push(`broken image: ${name(image)}`);
}

// Where an element can be seen: what a box cuts off or scrolls away does not count.
const area = (element) => {
  let { left, top, right, bottom } = element.getBoundingClientRect();
  for (let box = element.parentElement; box; box = box.parentElement) {
    if (getComputedStyle(box).overflowX === "visible") continue;
    const outer = box.getBoundingClientRect();
    left = Math.max(left, outer.left);
    right = Math.min(right, outer.right);
  }
  return { left, top: top + window.scrollY, right, bottom: bottom + window.scrollY };
};
const parts = [...document.querySelectorAll("h1, h2, h3, p, li, dt, dd, figcaption, img, summary, th, td, pre, .verdict, .card")]
  .filter((element) => shown(element) && (element.tagName === "IMG" || element.textContent.trim()))
  .map((element) => ({ element, ...area(element) }))
  .filter((one) => one.right > one.left && one.bottom > one.top && one.right > 0); // left of the page: for readers aloud
for (const one of parts) {
  if (one.right > window.innerWidth + 1 || one.left < -1) faults.push(`outside the window: ${name(one.element)}`);
  const { scrollWidth, clientWidth } = one.element;
  const cut = getComputedStyle(one.element).overflowX === "visible" && scrollWidth > clientWidth + 1 && clientWidth > 0;
  if (cut && one.element.tagName !== "IMG") faults.push(`its words are wider than itself: ${name(one.element)}`);
}
parts.sort((one, other) => one.top - other.top);
for (let i = 0; i < parts.length; i++) {
  for (let j = i + 1; j < parts.length && parts[j].top < parts[i].bottom - 1; j++) {
    const [one, other] = [parts[i], parts[j]];
    if (one.element.contains(other.element) || other.element.contains(one.element)) continue;
    const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    if (wide > 1 && high > 1) faults.push(`${name(one.element)} lies over ${name(other.element)}`);
  }
}
const sections = [...document.querySelectorAll("header, main > section, .finding")].map((element) => element.getBoundingClientRect());
for (let i = 1; i < sections.length; i++) {
  if (sections[i].top < sections[i - 1].bottom - 1) faults.push(`section ${i} begins before the one before it ends`);
}

// Contrast of text, after WCAG 2: at least 4.5 to 1.
const channels = (color) => (color.match(/[\d.]+/g) || []).map(Number);
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let box = element; box; box = box.parentElement) {
    const [r, g, b, alpha = 1] = channels(getComputedStyle(box).backgroundColor);
    if (alpha > 0.99) return [r, g, b];
  }
  return [255, 255, 255];
};
for (const element of document.querySelectorAll("body *")) {
  const words = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!words || !shown(element)) continue;
  const [one, other] = [channels(getComputedStyle(element).color).slice(0, 3), ground(element)].map(luminance);
  const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(2)}: ${name(element)}`);
  if (parseFloat(getComputedStyle(element).fontSize) < smallest) faults.push(`small print: ${name(element)}`);
}
return faults;
